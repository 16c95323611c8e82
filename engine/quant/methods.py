"""The names of quantisations: which are read, quantised at load, other words for these, or not served."""

from __future__ import annotations

# quant_method of a checkpoint → the module with its scheme, the scheme, and its name for people.
READ = {
    "awq": ("gptq", "AwqScheme", "AWQ"),
    "gptq": ("gptq", "GptqScheme", "GPTQ"),
    "auto_round": ("gptq", "AutoRoundScheme", "AutoRound"),
    "hqq": ("hqq", "HqqScheme", "HQQ"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytesScheme", "bitsandbytes"),
    "compressed_tensors": ("compressed_tensors", "CompressedTensorsScheme", "compressed-tensors"),
    "fp8": ("eight_bits", "Fp8Scheme", "FP8"),
    "fbgemm_fp8": ("eight_bits", "FbgemmFp8Scheme", "FBGEMM FP8"),
    "mxfp8": ("eight_bits", "Mxfp8Scheme", "MXFP8"),
    "mxfp4": ("fp4", "Mxfp4Scheme", "MXFP4"),
    "modelopt": ("modelopt", "ModelOptScheme", "ModelOpt"),
    "quark": ("quark", "QuarkScheme", "Quark"),
    "gguf_file": ("ggml_types", "GGUFScheme", "GGUF"),
}
# Other names that checkpoints use.
ALIASES = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "intel/auto_round": "auto_round",
    "autoround": "auto_round",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "finegrained_fp8": "fp8",
    "bnb": "bitsandbytes",
}
_AWQ, _GPTQ, _ROUND, _MODELOPT = ("awq", ""), ("gptq", ""), ("auto_round", ""), "modelopt"
# --quantization → the checkpoints it is right for: quant_method, and what its algorithm or format contains. Names of
# kernels mean the format they are for: the kernel is chosen here by the card and the number of rows.
FITS: dict[str, tuple[tuple[str, str], ...]] = {
    **{method: ((method, ""),) for method in READ},
    **{name: (_AWQ,) for name in ("auto_awq", "awq_marlin", "awq_triton", "cpu_awq")},
    **{name: (_GPTQ,) for name in ("auto_gptq", "gptq_marlin", "gptqmodel")},
    "gptq": (_GPTQ, _ROUND),
    "awq": (_AWQ, _ROUND),
    "auto_round": (_ROUND, _GPTQ, _AWQ),
    "inc": (_ROUND, _GPTQ, _AWQ),
    "marlin": (_GPTQ, _AWQ),
    "moe_wna16": (_GPTQ, _AWQ),
    "hqq_marlin": (("hqq", ""),),
    "gguf": (("gguf_file", ""),),
    "bnb": (("bitsandbytes", ""),),
    "deepgemm_fp8": (("fp8", ""),),
    "modelopt_fp8": ((_MODELOPT, "fp8"),),
    "modelopt_fp4": ((_MODELOPT, "nvfp4"),),
    "modelopt_mxfp8": ((_MODELOPT, "mxfp8"),),
    "modelopt_mixed": ((_MODELOPT, "mixed"),),
    "nvfp4": ((_MODELOPT, "nvfp4"), ("compressed_tensors", "nvfp4")),
    "petit_nvfp4": ((_MODELOPT, "nvfp4"), ("compressed_tensors", "nvfp4")),
    "mxfp4": (("mxfp4", ""), ("quark", "fp4"), ("compressed_tensors", "mxfp4")),
    "mxfp8": (("mxfp8", ""), (_MODELOPT, "mxfp8"), ("compressed_tensors", "mxfp8")),
    "w8a8_int8": (("compressed_tensors", "int"),),
    "w8a8_fp8": (("compressed_tensors", "float"),),
}
_FINER = "quantized to FP8 with a scale for each row, which is finer than what was asked for and as fast"
_ALL = "every matrix is quantized to 8 bits, where vLLM quantizes those of experts alone"
_NEAREST = "rounded to the nearest of 16 values: a checkpoint of AWQ or GPTQ loses less"
# --quantization of a checkpoint that is not quantised → kind in online.py, and what to say at the start.
AT_LOAD: dict[str, tuple[str, str | None]] = {
    "fp8": ("fp8", None),
    "fp8_per_channel": ("fp8", None),
    "ptpc_fp8": ("fp8", None),
    "fp8_per_tensor": ("fp8", _FINER),
    "fp8_per_block": ("fp8_blocks", None),
    "int8": ("int8", None),
    "int8_per_channel_weight_only": ("int8", _ALL),
    "experts_int8": ("int8", None),
    "int4": ("int4", _NEAREST),
    "bitsandbytes": ("nf4", None),
    "bnb": ("nf4", None),
    "nf4": ("nf4", None),
}
# What others quantise at load, vserve not → the nearest it does.
NOT_AT_LOAD = {
    **dict.fromkeys(("mxfp8", "deepspeedfp", "fbgemm_fp8"), "fp8"),
    **dict.fromkeys(
        ("mxfp4", "nvfp4", "nvfp4_per_token", "rtn", "torchao", "higgs", "fp_quant", "humming", "hqq"), "int4"
    ),
    **dict.fromkeys(("tpu_int8", "neuron_quant", "ipex", "quanto", "eetq"), "int8"),
}
_INT4 = "GPTQ or AWQ, 4 bit"
_OWN = "stored in a kernel's own layout"
# What is not read → its name for people, and the nearest that is.
REFUSED = {
    "aqlm": ("AQLM (sums of code book entries)", _INT4),
    "vptq": ("VPTQ (code books of vectors)", _INT4),
    "spqr": ("SpQR (outliers beside a grid)", _INT4),
    "higgs": ("HIGGS (Hadamard rotations and code books)", _INT4),
    "quip": ("QuIP (Hadamard rotations and code books)", _INT4),
    "quip_sharp": ("QuIP# (Hadamard rotations and code books)", _INT4),
    "fp_quant": ("FP-Quant (Hadamard rotations at run time)", "NVFP4 or MXFP4 of compressed-tensors"),
    "fouroversix": ("Four Over Six (NVFP4 with scales of its own)", "NVFP4 of compressed-tensors"),
    "nvfp4": ("transformers' own NVFP4 (scales in the order of its kernel)", "NVFP4 of compressed-tensors or ModelOpt"),
    "sinq": ("SINQ (two axes of scales)", "HQQ, or GPTQ or AWQ, 4 bit"),
    "qqq": (f"QQQ ({_OWN})", "GPTQ, 4 bit"),
    "squeezellm": ("SqueezeLLM (a code book a row)", _INT4),
    "gptq_marlin_24": (f"GPTQ with 2:4 sparsity ({_OWN})", "GPTQ, 4 bit, without sparsity"),
    "marlin_24": (f"GPTQ with 2:4 sparsity ({_OWN})", "GPTQ, 4 bit, without sparsity"),
    "sparseml": ("SparseML (2:4 sparsity)", "compressed-tensors without sparsity"),
    "marlin": (f"Marlin ({_OWN})", "GPTQ, 4 bit"),
    "gptq_marlin": (f"Marlin ({_OWN})", "GPTQ, 4 bit"),
    "awq_marlin": (f"Marlin ({_OWN})", "AWQ, 4 bit"),
    "bitblas": (f"BitBLAS ({_OWN})", "GPTQ, 4 bit"),
    "gptq_bitblas": (f"BitBLAS ({_OWN})", "GPTQ, 4 bit"),
    "exl2": ("EXL2 (columns of several widths)", _INT4),
    "exl3": ("EXL3 (trellis codes)", _INT4),
    "paroquant": ("ParoQuant (rotations at run time)", _INT4),
    "eetq": (f"EETQ ({_OWN})", "INT8 of compressed-tensors"),
    "quanto": ("Quanto (tensors pickled by its own classes)", "INT8 of compressed-tensors"),
    "torchao": ("torchao (tensors pickled by its own classes)", "compressed-tensors of the same widths"),
    "deepspeedfp": ("DeepSpeed FP6/FP8", "FP8 of compressed-tensors"),
    "tpu_int8": ("INT8 for TPUs", "INT8 of compressed-tensors"),
    "neuron_quant": ("Neuron's INT8", "INT8 of compressed-tensors"),
    "ipex": ("Intel's extension for PyTorch", _INT4),
    "rtn": ("RTN", _INT4),
    "bitnet": ("BitNet (weights of -1, 0 and 1 that its own product needs)", _INT4),
    "experts_int8": ("experts_int8", "INT8 of compressed-tensors"),
    "humming": (f"Humming ({_OWN})", _INT4),
    "metal": ("Metal's affine groups", _INT4),
    "mlx": ("MLX", _INT4),
    "gemma": ("Gemma's own quantization", "the GGUF file or compressed-tensors of the same model"),
    "qoq": ("QoQ (QServe)", _INT4),
    "w4afp8": ("W4A-FP8 of mixed checkpoints", "W4AFP8 of compressed-tensors"),
    "moe_wna16": ("moe_wna16", _INT4),
    "gguf": ("GGUF inside a Hugging Face folder", "the .gguf file itself: pass its path"),
}
UNREAD = "GPTQ, AWQ, compressed-tensors or FP8"  # nearest for a name that stands in no table here
