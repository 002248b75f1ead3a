// Kernels that decode rows of every format that is not GGUF.

DECODE_KERNEL(f32, Plain<float>)
DECODE_KERNEL(bf16, Plain<bf16>)
DECODE_KERNEL(f16, Plain<f16>)
DECODE_KERNEL(int8, Int8Rows)
DECODE_KERNEL(fp8, Fp8<false>)
DECODE_KERNEL(fp8_blocks, Fp8<true>)
DECODE_KERNEL(bnb4, Bnb4<false>)
DECODE_KERNEL(bnb4_nested, Bnb4<true>)
