// Up to eight rows of x times stored matrices: y (T, N) = x (T, K)·Wᵀ, plus a bias, a residual and h·Bᵀ of an adapter.
// One launch can have several products that do not depend on each other, such as q, k and v.
//
// Generation multiplies one row per sequence, so the time is that of reading the weights. Each is read once, as it is
// stored, by the formats of `decode.cuh`: 7B in bf16 is 15.2 GB, 3.2 ms at 4.8 TB/s.
// A team of `split` warps has two rows of W. Lanes take eight elements in turn, with all loads of a round in flight
// before the first is used; x comes from the cache. The first round is loaded before the previous kernel has ended:
// `decode` never writes a weight. Teams of small matrices have more warps, so that all multiprocessors have work. Every
// sum has an order that follows from the shape.
// Left out: rows that are not multiples of eight elements or not aligned, and GGUF.

#define FEW_THREADS 256
#define FEW_WARPS (FEW_THREADS / WARP)
#define FEW_OUTPUTS 2
#define FEW_IN_FLIGHT 4

#define FEW_PRODUCTS 3

struct FewRows {
    Source source;
    i64 first_row;   // of the matrix in its tensor
    i32 outputs;     // N
    i32 rows;        // T
    i32 first_block; // of the grid
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

struct FewProducts {
    FewRows products[FEW_PRODUCTS];
    i32 count;
};

// What a lane needs of its rows of W for one round.
template <typename Format> struct FewWeights {
    typename Format::Raw raw[FEW_IN_FLIGHT][FEW_OUTPUTS];

    __device__ __forceinline__ void read(const Format &format, const i64 (&rows)[FEW_OUTPUTS], i32 base, i32 step,
                                         i32 columns) {
#pragma unroll
        for (int i = 0; i < FEW_IN_FLIGHT; ++i) {
            const i32 column = min(base + i * step, columns - 8);
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o)
                raw[i][o] = format.read(rows[o], column);
        }
    }
};

template <typename Format, int ROWS> __device__ __forceinline__ void few_rows(const FewProducts &all) {
    start_next();
    int product = 0;
    while (product + 1 < all.count && (i32)blockIdx.x >= all.products[product + 1].first_block)
        ++product;
    const FewRows few = all.products[product];
    const Source source = few.source;
    const Format format(source);
    const i32 block = (i32)blockIdx.x - few.first_block;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int teams = FEW_WARPS / few.split, team = warp / few.split, part = warp % few.split;
    const i32 first_output = (block * teams + team) * FEW_OUTPUTS;
    float sums[FEW_OUTPUTS][ROWS] = {};
    // Rows beyond the last one repeat it, and are not written.
    i32 outputs[FEW_OUTPUTS];
    i64 rows_of_w[FEW_OUTPUTS];
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; ++o) {
        outputs[o] = min(first_output + o, few.outputs - 1);
        rows_of_w[o] = few.first_row + outputs[o];
    }
    const i32 step = few.split * WARP * 8, begin = (part * WARP + lane) * 8;
    FewWeights<Format> held;
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
        if (few.bias)
            sum += to_float(few.bias[output]);
        if (few.residual)
            sum += to_float(few.residual[row * few.residual_stride + output]);
        few.y[row * few.y_stride + output] = to_act(sum);
    }
}

#define FEW_KERNEL(NAME, ROWS, ...)                                                                                   \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                                          \
        few_rows_##NAME##_##ROWS(const __grid_constant__ FewProducts all) {                                            \
        few_rows<__VA_ARGS__, ROWS>(all);                                                                              \
    }

#define FEW_KERNELS(NAME, ...)                                                                                        \
    FEW_KERNEL(NAME, 1, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 2, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 4, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 8, __VA_ARGS__)

FEW_KERNELS(plain, Plain<act>)
FEW_KERNELS(int8, Int8Rows)
FEW_KERNELS(fp8, Fp8<false>)
FEW_KERNELS(fp8_blocks, Fp8<true>)
FEW_KERNELS(bnb4, Bnb4<false>)
FEW_KERNELS(bnb4_nested, Bnb4<true>)
