"""Fashion-MNIST from a slow disk, for the start page: each picture takes 2 ms, EMULATED by sleeping."""

import time

from torch import Tensor

from workbench.data.samples import FashionMnist


class Pictures(FashionMnist):
    """10,000 pictures, 28 × 28; no processor is used while one is waited for."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)
        return super().__getitem__(index)
