"""Result types of memory and their arithmetic, without torch."""
