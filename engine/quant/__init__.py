"""How the matrices of a checkpoint are stored, plain or quantised, and the products with them.

gptq: checkpoints of GPTQ, of AWQ, and of AutoRound, which has the layouts of both
bitsandbytes: checkpoints of bitsandbytes: NF4, FP4, int8
scheme: which quantisation a model is served with, and whether its configuration and its files agree
codes: a quantised matrix as every format is decoded to
decoded: what a format makes of the tensors of a matrix, checked to be finite
compressed_tensors: compressed-tensors, as llm-compressor writes it, and its integers for weights alone
config_groups: config_groups of compressed-tensors
experts: experts whose matrices keep the checkpoint's codes, on the CPU and on a GPU
format: a checkpoint's way to store a matrix: what a format has to say, what the files' headers say, and scales
fp4: 4-bit floats e2m1, two in a byte
eight_bits: codes of 8 bits: floats, and whole numbers for products with 8-bit inputs (INT8 W8A8)
ggml_types: the types that a GGUF file stores tensors in, and the scheme that reads them
gguf_blocks: the block formats of ggml as codes, scales and minima
hqq: HQQ checkpoints
integers: codes of the integer formats: out of packed words, in groups of columns, random ones
kv_scales: the scales of a checkpoint for keys and values in a cache of 8 bits, under all the names that they have
    had
matrix: products with a quantised matrix, on the CPU and packed for a GPU
method: a Linear whose parts the checkpoint stores quantised, each in its own way
methods: the names of quantisations
modelopt: NVIDIA's model optimizer
online: matrices of a 16-bit checkpoint, quantised as they are loaded
unquantized: products with weights in the activations' dtype
quantize: matrices quantised on the way in
quark: AMD's Quark
settings: values of a checkpoint's quantization_config that the integer formats are set by
weights: where weights live, how they are divided over ranks, and their way from a mapped file to the GPU
"""
