"""Result types and closed forms; arithmetic without torch."""
