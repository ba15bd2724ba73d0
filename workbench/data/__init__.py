"""Data: what a loader reads.

`shards` reads files out of tar shards by their offsets; `samples` offers the repository's own small data as datasets: `ClipArt`
(pictures to decode), `FashionMnist` (pictures that cost nothing), `Fashion` (the same, smaller, whole batches at once) and `ByteText`
(a novel).
"""
