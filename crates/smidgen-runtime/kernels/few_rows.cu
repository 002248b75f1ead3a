// Linear layers of up to eight rows: y (T, N) = x (T, K)·Wᵀ, plus a bias, a residual and scale·h·Bᵀ of an adapter, with
// W as it is stored. One launch can have several linears that do not depend on each other, such as q, k and v.
//
// Generation multiplies one row per sequence, so reading the weights takes nearly all of the time. Each weight is read
// once, as it is stored, by the formats of `decode.cuh`: 7B in bf16 is 15.2 GB, 3.2 ms at 4.8 TB/s.
// Up to two rows, and f32: a team of `split` warps has two rows of W. Lanes process groups of eight elements in turn,
// and issue all loads of a round before they use the first; x comes from the cache. The first round is loaded before
// the previous kernel has ended, which is allowed because `decode` never writes a weight. Small matrices have teams of
// more warps, so that all multiprocessors have work.
// More rows of 16-bit activations use tensor cores. Each row of x is a column of the instruction's B, and 32 rows of W
// are two A. A lane loads groups of eight elements as above. This permutes the summed dimension, but in the same way
// for W and x, so the sum is the same. The order of every sum depends only on the shape.
// Left out: rows that are not multiples of eight elements or not aligned, and GGUF.

#define FEW_THREADS 256
#define FEW_WARPS (FEW_THREADS / WARP)
#define FEW_OUTPUTS 2
#define FEW_IN_FLIGHT 4
#define TILED_OUTPUTS 4 // rows of W of a lane, eight apart

#define FEW_LINEARS 3

struct FewRows {
    Source source;
    i64 first_row;   // the first row of W in its tensor
    i32 outputs;     // N
    i32 rows;        // T
    i32 first_block; // the first block of the grid that works on this linear
    const act *x;
    i64 x_stride;
    act *y;
    i64 y_stride;
    const act *bias;     // or null
    const act *residual; // or null
    i64 residual_stride;
    const act *h; // or null
    i64 h_stride;
    const act *b;
    i64 b_stride;
    i32 rank;
    float scale;
    i32 split; // warps of a team
};

struct FewLinears {
    FewRows linears[FEW_LINEARS];
    i32 count;
};

// The part of its rows of W that a lane loads for one round.
template <typename Format, int IN_FLIGHT, int OUTPUTS> struct FewWeights {
    typename Format::Raw raw[IN_FLIGHT][OUTPUTS];

    __device__ __forceinline__ void read(const Format &format, const i64 (&rows)[OUTPUTS], i32 base, i32 step,
                                         i32 columns) {
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const i32 column = min(base + i * step, columns - 8);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o)
                raw[i][o] = format.read(rows[o], column);
        }
    }
};

// The linear that this block works on.
__device__ __forceinline__ const FewRows &linear_of_block(const FewLinears &all) {
    int linear = 0;
    while (linear + 1 < all.count && (i32)blockIdx.x >= all.linears[linear + 1].first_block)
        ++linear;
    return all.linears[linear];
}

// Adds bias and residual, and writes an element of y.
__device__ __forceinline__ void finish(const FewRows &few, i32 row, i32 output, float sum) {
    if (few.bias)
        sum += to_float(few.bias[output]);
    if (few.residual)
        sum += to_float(few.residual[row * few.residual_stride + output]);
    few.y[row * few.y_stride + output] = to_act(sum);
}

template <typename Format, int ROWS> __device__ __forceinline__ void few_rows(const FewLinears &all) {
    start_next();
    const FewRows few = linear_of_block(all);
    const Source source = few.source;
    const Format format(source);
    const i32 block = (i32)blockIdx.x - few.first_block;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int teams = FEW_WARPS / few.split, team = warp / few.split, part = warp % few.split;
    const i32 first_output = (block * teams + team) * FEW_OUTPUTS;
    float sums[FEW_OUTPUTS][ROWS] = {};
    // Rows of W beyond the last one repeat the last one, and their results are not written.
    i32 outputs[FEW_OUTPUTS];
    i64 rows_of_w[FEW_OUTPUTS];
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; ++o) {
        outputs[o] = min(first_output + o, few.outputs - 1);
        rows_of_w[o] = few.first_row + outputs[o];
    }
    const i32 step = few.split * WARP * 8, begin = (part * WARP + lane) * 8;
    FewWeights<Format, FEW_IN_FLIGHT, FEW_OUTPUTS> held;
    held.read(format, rows_of_w, begin, step, source.columns);
    await_previous();
    for (i32 base = begin; base < source.columns; base += FEW_IN_FLIGHT * step) {
        if (base > begin)
            held.read(format, rows_of_w, base, step, source.columns);
#pragma unroll
        for (int i = 0; i < FEW_IN_FLIGHT; ++i) {
            const i32 column = base + i * step;
            if (column >= source.columns)
                break;
            float weights[FEW_OUTPUTS][8];
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o)
                format.expand(held.raw[i][o], weights[o]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row >= few.rows)
                    break;
                float x[8];
                load_eight<act>(few.x + row * few.x_stride + column, x);
#pragma unroll
                for (int o = 0; o < FEW_OUTPUTS; ++o)
#pragma unroll
                    for (int c = 0; c < 8; ++c)
                        sums[o][row] = fmaf(x[c], weights[o][c], sums[o][row]);
            }
        }
    }
    if (few.h && part == 0) {
        for (i32 r = lane; r < few.rank; r += WARP) {
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o) {
                const float weight = few.scale * to_float(few.b[outputs[o] * few.b_stride + r]);
#pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    if (row < few.rows)
                        sums[o][row] = fmaf(to_float(few.h[row * few.h_stride + r]), weight, sums[o][row]);
            }
        }
    }
    __shared__ float parts[FEW_WARPS][FEW_OUTPUTS * ROWS];
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; ++o)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float sum = warp_sum(sums[o][row]);
            if (lane == 0)
                parts[warp][o * ROWS + row] = sum;
        }
    __syncthreads();
    for (int at = threadIdx.x; at < teams * FEW_OUTPUTS * ROWS; at += FEW_THREADS) {
        const int of_team = at / (FEW_OUTPUTS * ROWS), o = at / ROWS % FEW_OUTPUTS, row = at % ROWS;
        const i32 output = (block * teams + of_team) * FEW_OUTPUTS + o;
        if (output >= few.outputs || row >= few.rows)
            continue;
        float sum = 0.0f;
        for (int p = 0; p < few.split; ++p)
            sum += parts[of_team * few.split + p][o * ROWS + row];
        finish(few, row, output, sum);
    }
}

#if defined(ACT_F32)

template <typename Format> __device__ __forceinline__ void tiled_rows(const FewLinears &all) { few_rows<Format, 8>(all); }

#else

template <typename Format>
__device__ __forceinline__ uint4 words_of(const Format &format, const typename Format::Raw &raw) {
    float values[8];
    format.expand(raw, values);
    return pack<act>(values).words;
}

__device__ __forceinline__ uint4 words_of(const Plain<act> &, const Eight<act> &raw) { return raw.words; }

template <typename Format> struct InFlight {
    static const int ROUNDS = 4;
};

template <> struct InFlight<Plain<act>> {
    static const int ROUNDS = 2;
};

// Up to eight rows by tensor cores. A block has 32 rows of W. Its warps process 64 columns in turn, or 128 columns if W
// is stored as codes, which are shorter; both are whole cache lines. With g and t of `matrix_unit.cuh`, of each 32
// columns a lane has eight, of the rows g, g + 8, g + 16 and g + 24 of W and of row g of x.
template <typename Format> __device__ __forceinline__ void tiled_rows(const FewLinears &all) {
    const int IN_FLIGHT = InFlight<Format>::ROUNDS;
    start_next();
    const FewRows few = linear_of_block(all);
    const Source source = few.source;
    const Format format(source);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const i32 first_output = ((i32)blockIdx.x - few.first_block) * 8 * TILED_OUTPUTS;
    // Rows of W beyond the last one repeat the last one, and their results are not written.
    i64 rows_of_w[TILED_OUTPUTS];
#pragma unroll
    for (int o = 0; o < TILED_OUTPUTS; ++o)
        rows_of_w[o] = few.first_row + min(first_output + g + 8 * o, few.outputs - 1);
    const i32 of_warp = IN_FLIGHT * WARP, begin = warp * of_warp;
    FewWeights<Format, IN_FLIGHT, TILED_OUTPUTS> held;
    held.read(format, rows_of_w, begin + 8 * t, WARP, source.columns);
    await_previous();
    const act *x = few.x + min(g, few.rows - 1) * few.x_stride;
    float sums[TILED_OUTPUTS / 2][4] = {};
    for (i32 base = begin; base < source.columns; base += FEW_WARPS * of_warp) {
        if (base > begin)
            held.read(format, rows_of_w, base + 8 * t, WARP, source.columns);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (base + i * WARP >= source.columns)
                break;
            const i32 column = base + i * WARP + 8 * t;
            // Columns and rows beyond the matrices are multiplied by zeros.
            const bool here = column < source.columns && g < few.rows;
            const uint4 right = here ? read_eight<act>(x + column).words : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int tile = 0; tile < TILED_OUTPUTS / 2; ++tile) {
                const uint4 upper = words_of(format, held.raw[i][2 * tile]);
                const uint4 lower = words_of(format, held.raw[i][2 * tile + 1]);
                const u32 first[4] = {upper.x, lower.x, upper.y, lower.y};
                const u32 second[4] = {upper.z, lower.z, upper.w, lower.w};
                multiply_add(sums[tile], first, right.x, right.y);
                multiply_add(sums[tile], second, right.z, right.w);
            }
        }
    }
    __shared__ float parts[FEW_WARPS][8 * TILED_OUTPUTS][8];
#pragma unroll
    for (int tile = 0; tile < TILED_OUTPUTS / 2; ++tile)
#pragma unroll
        for (int at = 0; at < 4; ++at)
            parts[warp][16 * tile + 8 * (at / 2) + g][2 * t + at % 2] = sums[tile][at];
    __syncthreads();
    static_assert(FEW_THREADS == 8 * TILED_OUTPUTS * 8, "a thread for each result");
    const int own = threadIdx.x / 8, row = threadIdx.x % 8;
    const i32 output = first_output + own;
    if (output >= few.outputs || row >= few.rows)
        return;
    float sum = 0.0f;
    for (int p = 0; p < FEW_WARPS; ++p)
        sum += parts[p][own][row];
    if (few.h)
        for (i32 r = 0; r < few.rank; ++r)
            sum = fmaf(to_float(few.h[row * few.h_stride + r]), few.scale * to_float(few.b[output * few.b_stride + r]), sum);
    finish(few, row, output, sum);
}

#endif

#define FEW_KERNEL(NAME, ROWS, ...)                                                                                   \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                                          \
        few_rows_##NAME##_##ROWS(const __grid_constant__ FewLinears all) {                                            \
        few_rows<__VA_ARGS__, ROWS>(all);                                                                              \
    }

#define FEW_KERNELS(NAME, ...)                                                                                        \
    FEW_KERNEL(NAME, 1, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 2, __VA_ARGS__)                                                                                   \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                                          \
        few_rows_##NAME##_8(const __grid_constant__ FewLinears all) {                                                 \
        tiled_rows<__VA_ARGS__>(all);                                                                                  \
    }

FEW_KERNELS(plain, Plain<act>)
FEW_KERNELS(int8, Int8Rows)
FEW_KERNELS(fp8, Fp8<false>)
FEW_KERNELS(fp8_blocks, Fp8<true>)
FEW_KERNELS(bnb4, Bnb4<false>)
FEW_KERNELS(bnb4_nested, Bnb4<true>)
