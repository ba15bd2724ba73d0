"""The repository's sample data as datasets. (Your own data come with a `Task`, see `runs/task.py`.)

`shards.py` reads files out of tar shards by their offsets; `samples.py` has the datasets: `ClipArt`
(pictures to decode), `FashionMnist` (pictures that cost nothing), `Fashion` (the same, smaller, whole batches at once) and `ByteText`
(a novel).
"""
