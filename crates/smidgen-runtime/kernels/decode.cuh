// Decodes rows of a stored matrix, times a factor: consecutive rows for a matmul, or rows by id for an embedding.
// This text is prepended to the kernel files of the formats.
// A format is a type. Its `read` loads the bytes of eight elements of a row, and `expand` turns them into floats, with
// the same bits as `quant`. `one` decodes a single element, for rows that are not multiples of eight. Operations that
// the CPU rounds separately are never fused here.
// A thread decodes several groups of eight elements, with all loads before the stores. Neighbouring threads have
// neighbouring groups, so that a warp writes whole cache lines. NF4 reads 0.53 bytes and writes 2 (bf16) per element:
// a matrix of 3584 x 18944 is 171 MB, 41 us at 4.2 TB/s.

struct Source {
    const u8 *bytes; // the whole tensor
    i64 rows;        // rows of the whole tensor
    i64 stride;      // elements from one row to the next; used by plain formats only
    i32 columns;
    i32 code; // 4-bit codes: 0 NF4, 1 FP4
};

// Converts bytes to floats and subtracts `middle`, exactly: with a byte in its low bits, the float 2^23 becomes 2^23
// plus that byte.
__device__ __forceinline__ void floats_of_bytes(uint2 bytes, float middle, float (&y)[8]) {
    const float bias = 8388608.0f + middle;
#pragma unroll
    for (int at = 0; at < 4; ++at) {
        y[at] = __uint_as_float(__byte_perm(bytes.x, 0x4b000000u, 0x7440 | at)) - bias;
        y[4 + at] = __uint_as_float(__byte_perm(bytes.y, 0x4b000000u, 0x7440 | at)) - bias;
    }
}

__device__ __forceinline__ void floats_of_signed_bytes(uint2 bytes, float (&y)[8]) {
    floats_of_bytes(make_uint2(bytes.x ^ 0x80808080u, bytes.y ^ 0x80808080u), 128.0f, y);
}

__device__ __forceinline__ void times(float (&y)[8], float factor) {
#pragma unroll
    for (int at = 0; at < 8; ++at)
        y[at] = __fmul_rn(y[at], factor);
}

#define DECODE_THREADS 256
#define DECODE_IN_FLIGHT 4
#define DECODE_BATCHES 2

// Source rows and target of the decoder. If `ids` is null, the source rows are consecutive from `first_row` on. An id
// outside `table_rows` gives NaN.
struct Rows {
    void *target;
    i64 target_stride;
    i32 wide; // whether the target is f32 rather than `act`
    u32 rows;
    i64 first_row;
    const i32 *ids;
    i32 table_rows;
    float factor;

    __device__ __forceinline__ i64 source_row(u32 row, float &factor_here) const {
        factor_here = factor;
        if (!ids)
            return first_row + row;
        const i32 id = ids[row];
        if ((u32)id < (u32)table_rows)
            return first_row + id;
        factor_here = __int_as_float(0x7fc00000);
        return first_row;
    }
};

template <typename Format>
__device__ __forceinline__ void decode_aligned(const Format &format, const Rows &rows, u32 per_row, u32 group) {
    const u32 groups = rows.rows * per_row;
    const u32 step_rows = DECODE_THREADS / per_row, step_in_row = DECODE_THREADS % per_row;
    u32 row = group / per_row;
    u32 in_row = group - row * per_row;
    for (int batch = 0; batch < DECODE_BATCHES && group < groups; ++batch) {
        typename Format::Raw raw[DECODE_IN_FLIGHT];
        float factors[DECODE_IN_FLIGHT];
        i64 to[DECODE_IN_FLIGHT];
#pragma unroll
        for (int at = 0; at < DECODE_IN_FLIGHT; ++at) {
            to[at] = -1;
            if (group < groups) {
                const i64 source_row = rows.source_row(row, factors[at]);
                to[at] = (i64)row * rows.target_stride + (i32)in_row * 8;
                raw[at] = format.read(source_row, (i32)in_row * 8);
            }
            group += DECODE_THREADS;
            in_row += step_in_row;
            const bool next = in_row >= per_row;
            in_row -= next ? per_row : 0;
            row += step_rows + (next ? 1 : 0);
        }
#pragma unroll
        for (int at = 0; at < DECODE_IN_FLIGHT; ++at) {
            if (to[at] < 0)
                continue;
            float y[8];
            format.expand(raw[at], y);
            times(y, factors[at]);
            if (rows.wide)
                store_eight<float>((float *)rows.target + to[at], y);
            else
                store_eight<act>((act *)rows.target + to[at], y);
        }
    }
}

template <typename Format>
__device__ __forceinline__ void decode_unaligned(const Format &format, const Source &source, const Rows &rows,
                                                 u32 per_row, u32 group) {
    const u32 groups = rows.rows * per_row;
#pragma unroll 1
    for (int turn = 0; turn < DECODE_BATCHES * DECODE_IN_FLIGHT; ++turn, group += DECODE_THREADS) {
        if (group >= groups)
            return;
        const u32 row = group / per_row;
        const i32 column = (i32)(group - row * per_row) * 8;
        float factor;
        const i64 source_row = rows.source_row(row, factor);
        const i64 to = (i64)row * rows.target_stride;
        const i32 end = min(column + 8, source.columns);
#pragma unroll 1
        for (i32 at = column; at < end; ++at) {
            const float y = __fmul_rn(format.one(source_row, at), factor);
            if (rows.wide)
                ((float *)rows.target)[to + at] = y;
            else
                ((act *)rows.target)[to + at] = to_act(y);
        }
    }
}

template <typename Format>
__device__ __forceinline__ void decode_all(const Source &source, const Rows &rows, bool aligned) {
    const Format format(source);
    const u32 per_row = ((u32)source.columns + 7) / 8;
    const u32 group = blockIdx.x * (DECODE_THREADS * DECODE_IN_FLIGHT * DECODE_BATCHES) + threadIdx.x;
    if (aligned)
        decode_aligned(format, rows, per_row, group);
    else
        decode_unaligned(format, source, rows, per_row, group);
}

// `aligned`: rows are multiples of eight elements, and groups of eight can be read and written with vector accesses.
#define DECODE_KERNEL(NAME, ...)                                                                                      \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS)                                                       \
        decode_##NAME(void *target, i64 target_stride, i32 wide, u32 rows, const u8 *bytes, i64 total_rows,            \
                      i64 source_stride, i32 columns, i32 code, i32 aligned, i64 first_row, const i32 *ids,            \
                      i32 table_rows, float factor) {                                                                  \
        const Source source = {bytes, total_rows, source_stride, columns, code};                                       \
        const Rows places = {target, target_stride, wide, rows, first_row, ids, table_rows, factor};                   \
        decode_all<__VA_ARGS__>(source, places, aligned);                                                              \
    }
