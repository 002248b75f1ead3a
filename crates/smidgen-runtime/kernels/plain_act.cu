// Elementwise operations on one matrix: ReLU, SiLU, GELU by the error function, their gradients, a factor, and a bias.
//
// Matrices are cut into spans of eight elements (`_eight`), or of one if rows are not aligned (`_one`), numbered along
// the rows. A thread loads its span before it writes, so an output may be an input. Traffic in elements: 2, gradient 3.
// SiLU is x s with s = sigmoid(x); its derivative is s + x s (1 - s). GELU is x F(x) with the cumulative distribution F
// of the standard normal distribution; its derivative is F(x) + x f(x) with the density f.

#define PLAIN_RELU 0
#define PLAIN_SILU 1
#define PLAIN_GELU 2
#define PLAIN_SCALE 3

struct ValueAndSlope {
    float value, slope;
};

__device__ __forceinline__ ValueAndSlope value_and_slope(int kind, float factor, float x) {
    if (kind == PLAIN_RELU)
        // Comparisons with NaN are false: it must not become 0.
        return x > 0.0f ? ValueAndSlope{x, 1.0f} : ValueAndSlope{x != x ? x : 0.0f, 0.0f};
    if (kind == PLAIN_SILU) {
        float s = __frcp_rn(1.0f + expf(-x));
        return ValueAndSlope{x * s, s + x * s * (1.0f - s)};
    }
    if (kind == PLAIN_GELU) {
        float share = 0.5f * (1.0f + erff(x * 0.70710678f));
        return ValueAndSlope{x * share, share + x * 0.39894228f * expf(-0.5f * x * x)};
    }
    return ValueAndSlope{factor * x, factor};
}

// `factor` is used only by PLAIN_SCALE.
template <int N>
__device__ __forceinline__ void activate(int kind, float factor, const act *x, i64 x_stride, act *y, i64 y_stride,
                                         u32 spans_of_row, u32 spans) {
    u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    SpanPlace<N> place(span, spans_of_row);
    float value[N];
    load_span<N, act>(x + place.at(x_stride), value);
#pragma unroll
    for (int i = 0; i < N; ++i)
        value[i] = value_and_slope(kind, factor, value[i]).value;
    store_span<N, act>(y + place.at(y_stride), value);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_act_eight(int kind, float factor, const act *x, i64 x_stride, act *y, i64 y_stride, u32 spans_of_row,
                    u32 spans) {
    activate<8>(kind, factor, x, x_stride, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_act_one(int kind, float factor, const act *x, i64 x_stride, act *y, i64 y_stride, u32 spans_of_row,
                  u32 spans) {
    activate<1>(kind, factor, x, x_stride, y, y_stride, spans_of_row, spans);
}

// dx = dy act'(x)
template <int N>
__device__ __forceinline__ void slopes(int kind, const act *x, i64 x_stride, const act *dy, i64 dy_stride, act *dx,
                                       i64 dx_stride, u32 spans_of_row, u32 spans) {
    u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    SpanPlace<N> place(span, spans_of_row);
    float value[N], slope[N];
    load_span<N, act>(x + place.at(x_stride), value);
    load_span<N, act>(dy + place.at(dy_stride), slope);
#pragma unroll
    for (int i = 0; i < N; ++i)
        slope[i] *= value_and_slope(kind, 1.0f, value[i]).slope;
    store_span<N, act>(dx + place.at(dx_stride), slope);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_act_grad_eight(int kind, const act *x, i64 x_stride, const act *dy, i64 dy_stride, act *dx, i64 dx_stride,
                         u32 spans_of_row, u32 spans) {
    slopes<8>(kind, x, x_stride, dy, dy_stride, dx, dx_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_act_grad_one(int kind, const act *x, i64 x_stride, const act *dy, i64 dy_stride, act *dx, i64 dx_stride,
                       u32 spans_of_row, u32 spans) {
    slopes<1>(kind, x, x_stride, dy, dy_stride, dx, dx_stride, spans_of_row, spans);
}

// y = x + bias
template <int N>
__device__ __forceinline__ void shift(const act *x, i64 x_stride, const void *bias, int dtype, act *y, i64 y_stride,
                                      u32 spans_of_row, u32 spans) {
    u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    SpanPlace<N> place(span, spans_of_row);
    float value[N], shifts[N];
    load_span<N, act>(x + place.at(x_stride), value);
    if constexpr (N == 8)
        stored_eight(bias, dtype, place.column, shifts);
    else
        shifts[0] = stored_float(bias, dtype, place.column);
#pragma unroll
    for (int i = 0; i < N; ++i)
        value[i] += shifts[i];
    store_span<N, act>(y + place.at(y_stride), value);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_bias_eight(const act *x, i64 x_stride, const void *bias, int dtype, act *y, i64 y_stride, u32 spans_of_row,
                     u32 spans) {
    shift<8>(x, x_stride, bias, dtype, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    plain_bias_one(const act *x, i64 x_stride, const void *bias, int dtype, act *y, i64 y_stride, u32 spans_of_row,
                   u32 spans) {
    shift<1>(x, x_stride, bias, dtype, y, y_stride, spans_of_row, spans);
}
