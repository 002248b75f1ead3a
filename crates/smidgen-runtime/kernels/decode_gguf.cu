// The GGUF formats for `decode.cuh`. Layouts are ggml's, as in `quant/blocks.rs`. A row is a whole number of blocks, so
// eight elements never cross a block. Scale times code is exact in f32 except for q6_k, so adding the minimum is the
// only rounding.

__device__ __forceinline__ float half_bits(u32 bits) { return to_float(f16{(u16)bits}); }

// Eight bytes, aligned to two.
__device__ __forceinline__ uint2 eight_bytes_by_two(const u8 *at) {
    const u16 *pairs = (const u16 *)at;
    return make_uint2((u32)pairs[0] | (u32)pairs[1] << 16, (u32)pairs[2] | (u32)pairs[3] << 16);
}

// Eight bytes, aligned to four.
__device__ __forceinline__ uint2 eight_bytes_by_four(const u8 *at) {
    return make_uint2(((const u32 *)at)[0], ((const u32 *)at)[1]);
}

template <i32 ELEMENTS, i32 BYTES> struct Blocks {
    const u8 *bytes;
    i64 row_bytes;

    __device__ Blocks(const Source &source)
        : bytes(source.bytes), row_bytes((i64)(source.columns / ELEMENTS) * BYTES) {}

    __device__ const u8 *block(i64 row, i32 column) const {
        return bytes + row * row_bytes + (i64)(column / ELEMENTS) * BYTES;
    }
};

// Decodes one element, for targets that are not aligned.
template <typename Format> __device__ __forceinline__ float one_of_eight(const Format &format, i64 row, i32 column) {
    float y[8], chosen = 0.0f;
    format.expand(format.read(row, column & ~7), y);
#pragma unroll
    for (int at = 0; at < 8; ++at)
        chosen = (column & 7) == at ? y[at] : chosen;
    return chosen;
}

// Low nibbles are the first half of a block of 32 elements, high nibbles the second half.
__device__ __forceinline__ uint2 nibbles_of(uint2 bytes, bool high) {
    const int shift = high ? 4 : 0;
    return make_uint2(bytes.x >> shift & 0x0f0f0f0fu, bytes.y >> shift & 0x0f0f0f0fu);
}

// Adds the fifth bits of eight codes: bit i of `fifths` becomes bit 4 of byte i.
__device__ __forceinline__ uint2 with_fifths(uint2 nibbles, u32 fifths) {
    const u32 low = ((fifths & 15) * 0x00204081u & 0x01010101u) << 4;
    const u32 high = ((fifths >> 4 & 15) * 0x00204081u & 0x01010101u) << 4;
    return make_uint2(nibbles.x | low, nibbles.y | high);
}

__device__ __forceinline__ void scale_and_add(float (&y)[8], float scale, float addend) {
#pragma unroll
    for (int at = 0; at < 8; ++at)
        y[at] = fmaf(y[at], scale, addend); // y · scale is exact, so fusing changes nothing
}

struct Q4_0 : Blocks<32, 18> {
    struct Raw {
        uint2 bytes;
        u32 scale, high;
    };
    __device__ Q4_0(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        return Raw{eight_bytes_by_two(at + 2 + column % 16), *(const u16 *)at, (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_bytes(nibbles_of(raw.bytes, raw.high), 8.0f, y);
        times(y, half_bits(raw.scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Q4_1 : Blocks<32, 20> {
    struct Raw {
        uint2 bytes;
        u32 scales, high;
    };
    __device__ Q4_1(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        return Raw{eight_bytes_by_four(at + 4 + column % 16), *(const u32 *)at, (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_bytes(nibbles_of(raw.bytes, raw.high), 0.0f, y);
        scale_and_add(y, half_bits(raw.scales), half_bits(raw.scales >> 16));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Q5_0 : Blocks<32, 22> {
    struct Raw {
        uint2 bytes;
        u32 fifths, scale, high;
    };
    __device__ Q5_0(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const u16 *fifths = (const u16 *)(at + 2);
        const u32 all = (u32)fifths[0] | (u32)fifths[1] << 16;
        return Raw{eight_bytes_by_two(at + 6 + column % 16), all >> (column % 32), *(const u16 *)at,
                   (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_bytes(with_fifths(nibbles_of(raw.bytes, raw.high), raw.fifths), 16.0f, y);
        times(y, half_bits(raw.scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Q5_1 : Blocks<32, 24> {
    struct Raw {
        uint2 bytes;
        u32 fifths, scales, high;
    };
    __device__ Q5_1(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        return Raw{eight_bytes_by_four(at + 8 + column % 16), ((const u32 *)at)[1] >> (column % 32),
                   ((const u32 *)at)[0], (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_bytes(with_fifths(nibbles_of(raw.bytes, raw.high), raw.fifths), 0.0f, y);
        scale_and_add(y, half_bits(raw.scales), half_bits(raw.scales >> 16));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Q8_0 : Blocks<32, 34> {
    struct Raw {
        uint2 bytes;
        u32 scale;
    };
    __device__ Q8_0(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        return Raw{eight_bytes_by_two(at + 2 + column % 32), *(const u16 *)at};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        floats_of_signed_bytes(raw.bytes, y);
        times(y, half_bits(raw.scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// Scale and minimum of sub-block `index` of a q4_k or q5_k block, whose first 16 bytes are `head`.
__device__ __forceinline__ void six_bit_scales(uint4 head, int index, float &scale, float &minimum) {
    const int shift = 8 * (index % 4);
    const u32 first = head.y >> shift & 255, second = head.z >> shift & 255, third = head.w >> shift & 255;
    const u32 scale_code = index < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
    const u32 minimum_code = index < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
    scale = __fmul_rn(half_bits(head.x), (float)scale_code);
    minimum = __fmul_rn(half_bits(head.x >> 16), (float)minimum_code);
}

struct Q4K : Blocks<256, 144> {
    struct Raw {
        uint4 head;
        uint2 bytes;
        i32 sub;
    };
    __device__ Q4K(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256;
        const u8 *nibbles = at + 16 + inside / 64 * 32 + inside % 32;
        return Raw{*(const uint4 *)at, *(const uint2 *)nibbles, inside / 32};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        float scale, minimum;
        six_bit_scales(raw.head, raw.sub, scale, minimum);
        floats_of_bytes(nibbles_of(raw.bytes, raw.sub & 1), 0.0f, y);
        scale_and_add(y, scale, -minimum);
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Q5K : Blocks<256, 176> {
    struct Raw {
        uint4 head;
        uint2 bytes, fifths;
        i32 sub;
    };
    __device__ Q5K(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256;
        const u8 *nibbles = at + 48 + inside / 64 * 32 + inside % 32;
        return Raw{*(const uint4 *)at, *(const uint2 *)nibbles, *(const uint2 *)(at + 16 + inside % 32), inside / 32};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        float scale, minimum;
        six_bit_scales(raw.head, raw.sub, scale, minimum);
        uint2 codes = nibbles_of(raw.bytes, raw.sub & 1);
        codes.x |= (raw.fifths.x >> raw.sub & 0x01010101u) << 4;
        codes.y |= (raw.fifths.y >> raw.sub & 0x01010101u) << 4;
        floats_of_bytes(codes, 0.0f, y);
        scale_and_add(y, scale, -minimum);
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// In each half of 128 elements, four groups of 32 share bytes: low nibbles for two groups, high nibbles for the other
// two, and two more bits per element.
struct Q6K : Blocks<256, 210> {
    struct Raw {
        uint2 bytes, pairs;
        u32 scale;
        i32 sub_scale, part;
    };
    __device__ Q6K(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256, half = inside / 128, part = inside % 128 / 32, lane = inside % 32;
        return Raw{eight_bytes_by_two(at + 64 * half + 32 * (part % 2) + lane),
                   eight_bytes_by_two(at + 128 + 32 * half + lane), *(const u16 *)(at + 208),
                   ((const i8 *)at)[192 + inside / 16], part};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        uint2 codes = nibbles_of(raw.bytes, raw.part >= 2);
        codes.x |= (raw.pairs.x >> 2 * raw.part & 0x03030303u) << 4;
        codes.y |= (raw.pairs.y >> 2 * raw.part & 0x03030303u) << 4;
        floats_of_bytes(codes, 32.0f, y);
        times(y, __fmul_rn(half_bits(raw.scale), (float)raw.sub_scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// In each half of 128 elements, four groups of 32 share 32 bytes, two bits each. Sixteen bytes of scales and minimums come
// first, the scale and the minimum of the block last.
struct Q2K : Blocks<256, 84> {
    struct Raw {
        uint2 bytes;
        u32 scales, sub, shift;
    };
    __device__ Q2K(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256;
        return Raw{eight_bytes_by_four(at + 16 + inside / 128 * 32 + inside % 32), *(const u32 *)(at + 80),
                   at[inside / 16], (u32)(inside % 128 / 32 * 2)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        const uint2 codes = make_uint2(raw.bytes.x >> raw.shift & 0x03030303u, raw.bytes.y >> raw.shift & 0x03030303u);
        floats_of_bytes(codes, 0.0f, y);
        scale_and_add(y, __fmul_rn(half_bits(raw.scales), (float)(raw.sub & 15)),
                      -__fmul_rn(half_bits(raw.scales >> 16), (float)(raw.sub >> 4)));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// 32 bytes of third bits, one for each 32 elements, then pairs of bits as in q2_k, twelve bytes of scales, and the scale of
// the block.
struct Q3K : Blocks<256, 110> {
    struct Raw {
        uint2 bytes, thirds;
        u32 scale;
        i32 sub_scale, group;
    };
    __device__ Q3K(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256, index = inside / 16;
        const u8 *scales = at + 96;
        const i32 low = scales[index % 8] >> (index / 8 * 4) & 15, high = scales[8 + index % 4] >> (index / 4 * 2) & 3;
        return Raw{eight_bytes_by_two(at + 32 + inside / 128 * 32 + inside % 32), eight_bytes_by_two(at + inside % 32),
                   *(const u16 *)(at + 108), (low | high << 4) - 32, inside / 32};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        const int shift = raw.group % 4 * 2;
        uint2 codes = make_uint2(raw.bytes.x >> shift & 0x03030303u, raw.bytes.y >> shift & 0x03030303u);
        codes.x |= (raw.thirds.x >> raw.group & 0x01010101u) << 2;
        codes.y |= (raw.thirds.y >> raw.group & 0x01010101u) << 2;
        floats_of_bytes(codes, 4.0f, y);
        times(y, __fmul_rn(half_bits(raw.scale), (float)raw.sub_scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// Sixteen numbers of a byte each: those of iq4_nl and iq4_xs, and those of mxfp4, doubled.
struct Table {
    u32 words[4];

    __device__ __forceinline__ float of(u32 code) const {
        const u32 low = __byte_perm(words[0], words[1], code & 7), high = __byte_perm(words[2], words[3], code & 7);
        return (float)(i8)(code & 8 ? high : low);
    }

    // The numbers of eight codes, one in each byte.
    __device__ __forceinline__ void of_eight(uint2 codes, float (&y)[8]) const {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            y[at] = of(codes.x >> 8 * at & 15);
            y[4 + at] = of(codes.y >> 8 * at & 15);
        }
    }
};

// -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
__device__ __forceinline__ Table iq4_table() { return Table{{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}}; }

// 0 1 2 3, 4 6 8 12, and their negatives
__device__ __forceinline__ Table e2m1_table() { return Table{{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}}; }

struct Iq4Nl : Blocks<32, 18> {
    struct Raw {
        uint2 bytes;
        u32 scale, high;
    };
    __device__ Iq4Nl(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        return Raw{eight_bytes_by_two(at + 2 + column % 16), *(const u16 *)at, (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        iq4_table().of_eight(nibbles_of(raw.bytes, raw.high), y);
        times(y, half_bits(raw.scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

struct Iq4Xs : Blocks<256, 136> {
    struct Raw {
        uint2 bytes;
        u32 scale, high;
        i32 sub_scale;
    };
    __device__ Iq4Xs(const Source &source) : Blocks(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column);
        const i32 inside = column % 256, index = inside / 32;
        const i32 low = at[4 + index / 2] >> (index % 2 * 4) & 15, high = at[2 + index / 4] >> (index % 4 * 2) & 3;
        return Raw{eight_bytes_by_four(at + 8 + 16 * index + inside % 16), *(const u16 *)at, (u32)(inside & 16),
                   (low | high << 4) - 32};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        iq4_table().of_eight(nibbles_of(raw.bytes, raw.high), y);
        times(y, __fmul_rn(half_bits(raw.scale), (float)raw.sub_scale));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// A power of two, then nibbles. Blocks have an odd number of bytes, so nothing in them is aligned.
struct Mxfp4 : Blocks<32, 17> {
    struct Raw {
        uint2 bytes;
        u32 power, high;
    };
    __device__ Mxfp4(const Source &source) : Blocks(source) {}

    static __device__ __forceinline__ u32 four_bytes(const u8 *at) {
        return (u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
    }

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = block(row, column), *nibbles = at + 1 + column % 16;
        return Raw{make_uint2(four_bytes(nibbles), four_bytes(nibbles + 4)), at[0], (u32)(column & 16)};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        e2m1_table().of_eight(nibbles_of(raw.bytes, raw.high), y);
        times(y, __uint_as_float(raw.power < 2 ? 0x00200000u << raw.power : (raw.power - 1) << 23));
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

// GPTQ and AWQ: a scale, a number that is subtracted from codes, then two codes in each byte, the first one high.
template <i32 ELEMENTS> struct Int4 : Blocks<ELEMENTS, 4 + ELEMENTS / 2> {
    struct Raw {
        u32 codes, head;
    };
    __device__ Int4(const Source &source) : Blocks<ELEMENTS, 4 + ELEMENTS / 2>(source) {}

    __device__ Raw read(i64 row, i32 column) const {
        const u8 *at = this->block(row, column);
        return Raw{*(const u32 *)(at + 4 + column % ELEMENTS / 2), *(const u32 *)at};
    }

    __device__ void expand(const Raw &raw, float (&y)[8]) const {
        const float zero = (float)(raw.head >> 16 & 255), scale = half_bits(raw.head & 0xffffu);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            y[2 * byte] = (float)(raw.codes >> (8 * byte + 4) & 15) - zero;
            y[2 * byte + 1] = (float)(raw.codes >> (8 * byte) & 15) - zero;
        }
        times(y, scale);
    }

    __device__ float one(i64 row, i32 column) const { return one_of_eight(*this, row, column); }
};

DECODE_KERNEL(q4_0, Q4_0)
DECODE_KERNEL(q4_1, Q4_1)
DECODE_KERNEL(q5_0, Q5_0)
DECODE_KERNEL(q5_1, Q5_1)
DECODE_KERNEL(q8_0, Q8_0)
DECODE_KERNEL(q4_k, Q4K)
DECODE_KERNEL(q5_k, Q5K)
DECODE_KERNEL(q6_k, Q6K)
DECODE_KERNEL(q2_k, Q2K)
DECODE_KERNEL(q3_k, Q3K)
DECODE_KERNEL(iq4_nl, Iq4Nl)
DECODE_KERNEL(iq4_xs, Iq4Xs)
DECODE_KERNEL(mxfp4, Mxfp4)
DECODE_KERNEL(int4_by_32, Int4<32>)
DECODE_KERNEL(int4_by_128, Int4<128>)
