// The formats for `decode.cuh` that are not GGUF: plain elements, int8 and fp8 with their scales, and the 4-bit codes
// of bitsandbytes. This text is prepended to the kernel files that read these formats.

__device__ __forceinline__ float unaligned_float(const u8 *at) {
    if (((u64)at & 3) == 0)
        return *(const float *)at;
    return __uint_as_float((u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24);
}

template <typename T> struct Plain {
    typedef Eight<T> Raw;
    const T *elements;
    i64 stride;

    __device__ Plain(const Source &source) : elements((const T *)source.bytes), stride(source.stride) {}

    __device__ Raw read(i64 row, i32 column) const { return read_eight<T>(elements + row * stride + column); }

    __device__ void expand(const Raw &raw, float (&y)[8]) const { unpack<T>(raw, y); }

    __device__ float one(i64 row, i32 column) const { return to_float(elements[row * stride + column]); }
};

// One byte per element, followed by the largest magnitude of each row.
struct Int8Rows {
    struct Raw {
        uint2 codes;
        float largest;
    };
    const u8 *codes, *largest;
    i64 columns;

    __device__ Int8Rows(const Source &source)
        : codes(source.bytes), largest(source.bytes + source.rows * source.columns), columns(source.columns) {}

    __device__ Raw read(i64 row, i32 column) const {
        return Raw{*(const uint2 *)(codes + row * columns + column), *(const float *)(largest + 4 * row)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_signed_bytes(raw.codes, y);
        times(y, __fmul_rn(raw.largest, 1.0f / 127.0f));
    }

    __device__ float one(i64 row, i32 column) const {
        const float scale = __fmul_rn(unaligned_float(largest + 4 * row), 1.0f / 127.0f);
        return __fmul_rn((float)(i8)codes[row * columns + column], scale);
    }
};

// One 8-bit float (e4m3) per element, followed by the scales: one per row or, if `SQUARES`, one per square of 128 by
// 128.
template <bool SQUARES> struct Fp8 {
    struct Raw {
        uint2 codes;
        float scale;
    };
    const u8 *codes, *scales;
    i64 columns;

    __device__ Fp8(const Source &source)
        : codes(source.bytes), scales(source.bytes + source.rows * source.columns), columns(source.columns) {}

    // Exponent and mantissa are moved to their places in an f32. The exponent bias differs by 120, so the number is
    // then multiplied by 2^120. A magnitude of all ones is NaN.
    static __device__ float number(u32 code) {
        if ((code & 0x7fu) == 0x7fu)
            return __uint_as_float(0x7fc00000u);
        const u32 bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
        return __fmul_rn(__uint_as_float(bits), __uint_as_float((127u + 120u) << 23));
    }

    __device__ const u8 *scale_at(i64 row, i32 column) const {
        return scales + 4 * (SQUARES ? row / 128 * ((columns + 127) / 128) + column / 128 : row);
    }

    __device__ Raw read(i64 row, i32 column) const {
        return Raw{*(const uint2 *)(codes + row * columns + column), *(const float *)scale_at(row, column)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            y[at] = number(raw.codes.x >> (8 * at));
            y[4 + at] = number(raw.codes.y >> (8 * at));
        }
        times(y, raw.scale);
    }

    __device__ float one(i64 row, i32 column) const {
        return __fmul_rn(number(codes[row * columns + column]), unaligned_float(scale_at(row, column)));
    }
};

__device__ const float code4_values[2][16] = {
    {-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f, 0.0795803f,
     0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f},
    {0.0f, 0.0052083335f, 0.6666667f, 1.0f, 0.33333334f, 0.5f, 0.16666667f, 0.25f, 0.0f, -0.0052083335f,
     -0.6666667f, -1.0f, -0.33333334f, -0.5f, -0.16666667f, -0.25f},
};

// Two codes per byte of the flattened tensor, the first in the high nibble, and one scale per 64 codes. A scale is an
// f32 or, if `NESTED`, a byte that is decoded with one f32 per 256 scales.
template <bool NESTED> struct Bnb4 {
    struct Raw {
        u32 codes;
        float scale; // the scale of the block, or of its group of 256 blocks if `NESTED`
        u32 byte;
    };
    const u8 *codes, *scales, *groups;
    const float *values;
    i64 columns;
    float offset;

    // All threads of the block must call this, because it copies the sixteen values to shared memory.
    __device__ Bnb4(const Source &source) : codes(source.bytes), columns(source.columns), offset(0.0f) {
        __shared__ float shared_values[16];
        if (threadIdx.x < 16)
            shared_values[threadIdx.x] = code4_values[source.code][threadIdx.x];
        __syncthreads();
        values = shared_values;
        const i64 elements = source.rows * source.columns;
        const i64 blocks = (elements + 63) / 64;
        scales = codes + (elements + 1) / 2;
        groups = scales + blocks;
        if (NESTED)
            offset = unaligned_float(groups + 4 * ((blocks + 255) / 256));
    }

    __device__ float scale_of(float scale, u32 byte) const {
        return NESTED ? __fadd_rn(__fmul_rn(signed_map.at[byte], scale), offset) : scale;
    }

    __device__ Raw read(i64 row, i32 column) const {
        const i64 element = row * columns + column;
        const u32 here = *(const u32 *)(codes + element / 2);
        const i64 block = element / 64;
        if (NESTED)
            return Raw{here, ((const float *)groups)[block / 256], scales[block]};
        return Raw{here, ((const float *)scales)[block], 0};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        const float scale = scale_of(raw.scale, raw.byte);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            y[2 * byte] = __fmul_rn(values[raw.codes >> (8 * byte + 4) & 15], scale);
            y[2 * byte + 1] = __fmul_rn(values[raw.codes >> (8 * byte) & 15], scale);
        }
    }

    __device__ float one(i64 row, i32 column) const {
        const i64 element = row * columns + column, block = element / 64;
        const u32 code = codes[element / 2] >> (element % 2 ? 0 : 4) & 15;
        const float scale = NESTED ? unaligned_float(groups + 4 * (block / 256)) : unaligned_float(scales + 4 * block);
        return __fmul_rn(values[code], scale_of(scale, NESTED ? scales[block] : 0));
    }
};
