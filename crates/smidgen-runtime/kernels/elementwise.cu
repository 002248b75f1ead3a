// Add, gather, scatter, dropout, and column sums in two steps.
//
// Matrices are cut into spans of eight elements (`_eight`), or of one if rows are not aligned (`_one`). Spans are
// numbered along the rows; `spans_of_row` and `spans` are their counts. A thread handles two spans and loads both
// before it writes, so `add` and `dropout` may overwrite an input. Dropout stores no mask: whether an element is kept
// is a pure function of its token's key, the tensor's number and the channel, exactly as on the CPU. So backward runs
// the same kernel on dy. Column sums first write partial sums of some rows, in a grid that depends only on the sizes.
// `add_partial_rows` then adds them in order.

// Copies bits, without a conversion.
template <int N> __device__ __forceinline__ void copy_span(const act *from, act *to) {
    if constexpr (N == 8)
        write_eight<act>(to, read_eight<act>(from));
    else
        to[0] = from[0];
}

// ── y = a + scale b; traffic 3 elements ────────────────────────────────────────────────────────────────

template <int N>
__device__ __forceinline__ void add_spans(const act *a, i64 a_stride, const act *b, i64 b_stride, float scale, act *y,
                                          i64 y_stride, u32 spans_of_row, u32 spans) {
    u32 index = blockIdx.x * 2 * blockDim.x + threadIdx.x;
    float left[2][N], right[2][N];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            SpanPlace<N> place(span, spans_of_row);
            load_span<N, act>(a + place.at(a_stride), left[k]);
            load_span<N, act>(b + place.at(b_stride), right[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
#pragma unroll
            for (int i = 0; i < N; ++i)
                left[k][i] = __fadd_rn(left[k][i], __fmul_rn(scale, right[k][i]));
            store_span<N, act>(y + SpanPlace<N>(span, spans_of_row).at(y_stride), left[k]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    add_eight(const act *a, i64 a_stride, const act *b, i64 b_stride, float scale, act *y, i64 y_stride,
              u32 spans_of_row, u32 spans) {
    add_spans<8>(a, a_stride, b, b_stride, scale, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    add_one(const act *a, i64 a_stride, const act *b, i64 b_stride, float scale, act *y, i64 y_stride,
            u32 spans_of_row, u32 spans) {
    add_spans<1>(a, a_stride, b, b_stride, scale, y, y_stride, spans_of_row, spans);
}

// ── columns of heads, in the heads of y; traffic 2 elements ──────────────────────────────────────

struct PlacedHeads {
    const act *x;
    i64 x_stride;
    act *y;
    i64 y_stride;
    // Columns from one head to the next; 0 for x if all heads of y get the same.
    int rows, x_head, y_head, heads;
    // How many heads of x are added up, in order.
    int summed;
    // Columns that are copied, and with those that become zero after them.
    int columns, span;
};

template <int N> __device__ __forceinline__ void place_heads(const PlacedHeads &all) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const int units = all.span / N;
    const i64 place = index / units, row = place / all.heads;
    const int column = N * (int)(index - place * units), head = (int)(place - row * all.heads);
    if (row >= all.rows)
        return;
    act *to = all.y + row * all.y_stride + (i64)head * all.y_head + column;
    float sum[N];
    if (column >= all.columns) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            sum[i] = 0.0f;
        store_span<N, act>(to, sum);
        return;
    }
    const act *from = all.x + row * all.x_stride + (i64)head * all.x_head + column;
    if (all.summed == 1) {
        copy_span<N>(from, to);
        return;
    }
    load_span<N, act>(from, sum);
    for (int other = 1; other < all.summed; ++other) {
        float addend[N];
        load_span<N, act>(from + (i64)other * all.x_head, addend);
#pragma unroll
        for (int i = 0; i < N; ++i)
            sum[i] = __fadd_rn(sum[i], addend[i]);
    }
    store_span<N, act>(to, sum);
}

extern "C" __global__ void __launch_bounds__(256) place_heads_eight(const __grid_constant__ PlacedHeads all) {
    place_heads<8>(all);
}

extern "C" __global__ void __launch_bounds__(256) place_heads_one(const __grid_constant__ PlacedHeads all) {
    place_heads<1>(all);
}

// ── y = s x with a stored number s for each `width` channels; traffic 2 elements ──────────────────

template <int N>
__device__ __forceinline__ void scale_spans(const act *x, i64 x_stride, const void *scale, int dtype, int width, act *y,
                                            i64 y_stride, u32 spans_of_row, u32 spans) {
    u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    SpanPlace<N> place(span, spans_of_row);
    float value[N];
    load_span<N, act>(x + place.at(x_stride), value);
#pragma unroll
    for (int i = 0; i < N; ++i)
        value[i] *= stored_float(scale, dtype, (place.column + i) / width);
    store_span<N, act>(y + place.at(y_stride), value);
}

extern "C" __global__ void __launch_bounds__(256)
    scale_by_eight(const act *x, i64 x_stride, const void *scale, int dtype, int width, act *y, i64 y_stride,
                   u32 spans_of_row, u32 spans) {
    scale_spans<8>(x, x_stride, scale, dtype, width, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    scale_by_one(const act *x, i64 x_stride, const void *scale, int dtype, int width, act *y, i64 y_stride,
                   u32 spans_of_row, u32 spans) {
    scale_spans<1>(x, x_stride, scale, dtype, width, y, y_stride, spans_of_row, spans);
}

// Block (p, n) writes the sum of x dy over `rows_per_partial` rows and the n-th `columns` channels to row p of `partials`.
// Traffic: 2 elements.
extern "C" __global__ void __launch_bounds__(256)
    dot_partials(const act *x, i64 x_stride, const act *dy, i64 dy_stride, int rows, int columns, int rows_per_partial,
                 float *partials) {
    x += (i64)blockIdx.y * columns;
    dy += (i64)blockIdx.y * columns;
    const int first = blockIdx.x * rows_per_partial, last = min(first + rows_per_partial, rows);
    float sum = 0.0f;
    for (int row = first; row < last; ++row)
#pragma unroll 4
        for (int column = threadIdx.x; column < columns; column += blockDim.x)
            sum += to_float(x[row * x_stride + column]) * to_float(dy[row * dy_stride + column]);
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        partials[(i64)blockIdx.x * gridDim.y + blockIdx.y] = sum;
}

// The gradient of the sinks of attention. A sink s of a head has the share p = exp(s - lse) of each query and no value, so
// ds = -p (do · o), summed over the queries. Block i writes the sums over `rows_per_partial` queries to row i of
// `partials` (P, H). Traffic: 2 elements.
extern "C" __global__ void __launch_bounds__(256)
    sink_partials(const act *o, i64 o_stride, const float *lse, const act *dout, i64 dout_stride, const void *sinks,
                  int dtype, float *partials, int rows, int heads, int head_dim, int rows_per_partial) {
    const int first = blockIdx.x * rows_per_partial, last = min(first + rows_per_partial, rows);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int head = 0; head < heads; ++head) {
        const float sink = stored_float(sinks, dtype, head);
        float sum = 0.0f;
        for (int row = first + warp; row < last; row += 8) {
            const act *a = o + row * o_stride + (i64)head * head_dim, *b = dout + row * dout_stride + (i64)head * head_dim;
            const float share = expf(sink - lse[(i64)row * heads + head]);
            for (int channel = lane; channel < head_dim; channel += WARP)
                sum -= share * to_float(a[channel]) * to_float(b[channel]);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0)
            partials[(i64)blockIdx.x * heads + head] = sum;
    }
}

// ── rows ─────────────────────────────────────────────────────────────────────────────────────────

// y[r] = x[rows[r]]; traffic 2 elements. A row outside `x_rows` is an error of the caller.
template <int N>
__device__ __forceinline__ void gather_spans(const act *x, i64 x_stride, int x_rows, const int *rows, act *y,
                                             i64 y_stride, u32 spans_of_row, u32 spans) {
    u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    SpanPlace<N> place(span, spans_of_row);
    int row = rows[place.row];
    if ((u32)row >= (u32)x_rows)
        __trap();
    copy_span<N>(x + (i64)row * x_stride + place.column, y + place.at(y_stride));
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows_eight(const act *x, i64 x_stride, int x_rows, const int *rows, act *y, i64 y_stride,
                      u32 spans_of_row, u32 spans) {
    gather_spans<8>(x, x_stride, x_rows, rows, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows_one(const act *x, i64 x_stride, int x_rows, const int *rows, act *y, i64 y_stride, u32 spans_of_row,
                    u32 spans) {
    gather_spans<1>(x, x_stride, x_rows, rows, y, y_stride, spans_of_row, spans);
}

// The gradient of gather: dx[rows[r]] = dy[r], and every other row of dx is zero. `rows` is strictly ascending. A warp
// searches `rows` for its row of dx and writes it once. Traffic: `dx_rows` + `count` rows.
template <int N>
__device__ __forceinline__ void scatter_spans(const act *dy, i64 dy_stride, const int *rows, int count, act *dx,
                                              i64 dx_stride, int dx_rows, int columns) {
    int row = (int)(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    if (row >= dx_rows)
        return;
    int low = 0, high = count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (rows[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    bool named = low < count && rows[low] == row;
    const act *from = dy + (i64)low * dy_stride;
    act *to = dx + (i64)row * dx_stride;
    const float zeros[N] = {};
#pragma unroll 4
    for (int column = N * (int)(threadIdx.x % WARP); column < columns; column += N * WARP)
        if (named)
            copy_span<N>(from + column, to + column);
        else
            store_span<N, act>(to + column, zeros);
}

extern "C" __global__ void __launch_bounds__(256)
    scatter_rows_eight(const act *dy, i64 dy_stride, const int *rows, int count, act *dx, i64 dx_stride, int dx_rows,
                       int columns) {
    scatter_spans<8>(dy, dy_stride, rows, count, dx, dx_stride, dx_rows, columns);
}

extern "C" __global__ void __launch_bounds__(256)
    scatter_rows_one(const act *dy, i64 dy_stride, const int *rows, int count, act *dx, i64 dx_stride, int dx_rows,
                     int columns) {
    scatter_spans<1>(dy, dy_stride, rows, count, dx, dx_stride, dx_rows, columns);
}

// ── dropout ──────────────────────────────────────────────────────────────────────────────────────

// y = dropout(x): elements whose random bits are below `threshold` become 0, the others x * scale. With `rest`,
// y = x - dropout(x). Traffic 2 elements, and about 20 integer instructions for each.
template <int N>
__device__ __forceinline__ void drop_spans(const act *x, i64 x_stride, const u64 *keys, u32 tensor, u32 threshold,
                                           float scale, int rest, act *y, i64 y_stride, u32 spans_of_row,
                                           u32 spans) {
    u32 index = blockIdx.x * 2 * blockDim.x + threadIdx.x;
    float value[2][N];
    u64 key[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            SpanPlace<N> place(span, spans_of_row);
            load_span<N, act>(x + place.at(x_stride), value[k]);
            key[k] = keys[place.row];
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            SpanPlace<N> place(span, spans_of_row);
            u64 of_row = absorb(key[k], tensor);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                bool stays = channel_bits(of_row, (u32)(place.column + i)) >= threshold;
                // Rounded before the difference, so that `rest` is exactly x minus the result of dropout.
                float kept = stays ? __fmul_rn(value[k][i], scale) : 0.0f;
                value[k][i] = rest ? __fsub_rn(value[k][i], kept) : kept;
            }
            store_span<N, act>(y + place.at(y_stride), value[k]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    dropout_eight(const act *x, i64 x_stride, const u64 *keys, u32 tensor, u32 threshold, float scale, int rest,
                  act *y, i64 y_stride, u32 spans_of_row, u32 spans) {
    drop_spans<8>(x, x_stride, keys, tensor, threshold, scale, rest, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    dropout_one(const act *x, i64 x_stride, const u64 *keys, u32 tensor, u32 threshold, float scale, int rest,
                act *y, i64 y_stride, u32 spans_of_row, u32 spans) {
    drop_spans<1>(x, x_stride, keys, tensor, threshold, scale, rest, y, y_stride, spans_of_row, spans);
}

// ── column sums ──────────────────────────────────────────────────────────────────────────────────

// Row blockIdx.y of `partials` (P, columns) = the sums over `rows_per_partial` rows of dy, from
// blockIdx.y * rows_per_partial on. A warp reads 256 columns of a row. The block's warps take turns over the rows, and
// their sums are added in order.
template <bool ALIGNED>
__device__ __forceinline__ void sum_rows(const act *dy, i64 dy_stride, int rows, int columns, int rows_per_partial,
                                         float *partials) {
    __shared__ float warp_sums[8][8 * WARP];
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    int in_tile = 8 * (threadIdx.x % WARP);
    int first = 8 * WARP * blockIdx.x + in_tile;
    int begin = blockIdx.y * rows_per_partial;
    int end = min(begin + rows_per_partial, rows);
    float sum[8] = {};
#pragma unroll 4
    for (int row = begin + warp; row < end; row += warps) {
        const act *from = dy + (i64)row * dy_stride + first;
        float value[8] = {};
        if constexpr (ALIGNED) {
            if (first < columns)
                load_eight<act>(from, value);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (first + i < columns)
                    value[i] = to_float(from[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum[i] += value[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        warp_sums[warp][in_tile + i] = sum[i];
    __syncthreads();
    for (int column = threadIdx.x; column < 8 * WARP; column += blockDim.x)
        if (8 * WARP * blockIdx.x + column < columns) {
            float total = 0.0f;
            for (int other = 0; other < warps; ++other)
                total += warp_sums[other][column];
            partials[(i64)blockIdx.y * columns + 8 * WARP * blockIdx.x + column] = total;
        }
}

extern "C" __global__ void __launch_bounds__(256)
    column_partials_eight(const act *dy, i64 dy_stride, int rows, int columns, int rows_per_partial,
                          float *partials) {
    sum_rows<true>(dy, dy_stride, rows, columns, rows_per_partial, partials);
}

extern "C" __global__ void __launch_bounds__(256)
    column_partials_one(const act *dy, i64 dy_stride, int rows, int columns, int rows_per_partial, float *partials) {
    sum_rows<false>(dy, dy_stride, rows, columns, rows_per_partial, partials);
}

// to[c] += the sum of column c of `partials` (count, columns). Eight warps take turns over the rows for 32 columns,
// and their sums are added in order. 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    add_partial_rows(const float *partials, int count, int columns, float *to) {
    __shared__ float warp_sums[8][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int column = WARP * blockIdx.x + lane;
    float sum = 0.0f;
    if (column < columns)
#pragma unroll 4
        for (int row = warp; row < count; row += 8)
            sum += partials[(i64)row * columns + column];
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < columns) {
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < 8; ++other)
            total += warp_sums[other][lane];
        to[column] += total;
    }
}
