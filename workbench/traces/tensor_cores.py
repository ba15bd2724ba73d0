"""Tensor cores: which kernels compute on them, and which operators could, both told by their names.

A name is all that a trace has of it. A kernel whose name says neither counts as one without: shares are lower bounds. Of Triton's kernels
no name says it.
"""

import re

USES = re.compile(
    r"(?<![a-z])[hsidc](884|1684|1688|8816|16816|16832|16864)(?!\d)"  # what one instruction multiplies, after the type it adds up in
    r"|tensorop|tensor\d+x\d+x\d+|(?<![a-z])[hiw]mma|gmma|xmma|nvjet"
    r"|flash_fwd_(splitkv_)?kernel|flash_bwd_dq_dk_dv|fmha_cutlass[fb]_b?f16"
    r"|first_layer_wgrad_kernel|dgrad_1x1_stride_2x2|conv1x1|conv2d_c1_k1|direct_group"
    r"|cijk_\w*_mi\d|xdl",
    re.IGNORECASE,
)
"""Names of kernels on tensor cores (on AMD's, matrix cores).

Source: the list of NVIDIA's PyProf, pyprof/prof/tc.py (which torch-tb-profiler has taken over), for the older names of cuBLAS and cuDNN;
CUTLASS's names of operations (tensorop, wmma, the shapes of PTX's mma instructions); those of cuBLAS since 12 (nvjet); FlashAttention
and torch's memory-efficient attention in 16 bits; AMD's Tensile (MI: MatrixInstruction) and Composable Kernel (xdl)."""
WITHOUT = re.compile(r"simt|ffma", re.IGNORECASE)
"""Names that say that it does without, whatever else they say: `sm80_xmma_gemm_…_ffma_…` is no kernel of tensor cores."""

ELIGIBLE = re.compile(
    r"aten::(_?(scaled_|grouped_)?mm|_scaled_grouped_mm|t?bmm|addmm_?|_addmm_activation|baddbmm_?|addbmm_?|mv|addmv_?|linear|matmul"
    r"|conv(_transpose)?[123]d|_?(cudnn_|miopen_|slow_|thnn_)?conv(?!ert)\w*|_cudnn_rnn\w*|_?(flash|efficient|cudnn)_attention_\w+"
    r"|_?scaled_dot_product_\w*attention\w*)$"
)
"""Operators that could use them. Source: torch's docs on amp, "CUDA Ops that can autocast to float16", with attention, with what their
backward passes call, and without cells of recurrent nets, whose own kernels are elementwise."""


def uses(kernel: str) -> bool:
    """Does the name of a kernel say that it computes on tensor cores?

    >>> uses("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_nn"), uses("ampere_sgemm_128x64_tn")
    (True, False)
    """
    return bool(USES.search(kernel)) and not WITHOUT.search(kernel)


def eligible(operator: str) -> bool:
    """Could an operator use them: is it a product of matrices, a convolution, or attention?

    >>> eligible("aten::addmm"), eligible("aten::add")
    (True, False)
    """
    return bool(ELIGIBLE.match(operator))
