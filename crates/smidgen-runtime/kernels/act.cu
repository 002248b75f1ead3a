// Gated activations, act(gate) * up, and their gradients.
//
// Both activations are x s with a sigmoid s: for SiLU s = sigmoid(x); for the tanh form of GELU
// s = (1 + tanh u) / 2 = sigmoid(2u). So the slope is s + x s (1 - s) z', where z is the argument of the sigmoid.
// `kind` is 0 for SiLU, 1 for GELU.
// A thread handles two spans of eight channels (or two single channels, if rows are not aligned) and loads everything
// before it writes, so an output may be any one of the inputs. Traffic in elements: forward 3, gradient 5, gradient
// with the value 6.

#define ACT_SILU 0

struct Gate {
    float sigmoid, slope_of_argument;
};

__device__ __forceinline__ float sigmoid(float x) { return __frcp_rn(1.0f + expf(-x)); }

__device__ __forceinline__ Gate gate_of(int kind, float x) {
    if (kind == ACT_SILU)
        return Gate{sigmoid(x), 1.0f};
    const float twice_slope = 1.5957692f, cubic = 0.044715f;
    float square = x * x;
    return Gate{sigmoid(twice_slope * (x + cubic * (square * x))), twice_slope * (1.0f + 3.0f * cubic * square)};
}

// Span `index` of the matrix.
struct Place {
    i64 row;
    int column;
};

template <int N> __device__ __forceinline__ Place place_of(u32 index, u32 spans_of_row) {
    u32 row = index / spans_of_row;
    return Place{(i64)row, N * (int)(index - row * spans_of_row)};
}

template <int N>
__device__ __forceinline__ void activate(int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride,
                                         act *y, i64 y_stride, u32 spans_of_row, u32 spans) {
    start_next();
    await_previous();
    u32 index = blockIdx.x * 2 * blockDim.x + threadIdx.x;
    float x[2][N], other[2][N];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            Place place = place_of<N>(span, spans_of_row);
            load_span<N, act>(gate + place.row * gate_stride + place.column, x[k]);
            load_span<N, act>(up + place.row * up_stride + place.column, other[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            Place place = place_of<N>(span, spans_of_row);
            float out[N];
#pragma unroll
            for (int i = 0; i < N; ++i)
                out[i] = x[k][i] * gate_of(kind, x[k][i]).sigmoid * other[k][i];
            store_span<N, act>(y + place.row * y_stride + place.column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_eight(int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y, i64 y_stride,
                    u32 spans_of_row, u32 spans) {
    activate<8>(kind, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_one(int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y, i64 y_stride,
                  u32 spans_of_row, u32 spans) {
    activate<1>(kind, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans);
}

// `value` is null, or receives act(gate) * up, the forward result, for a backward pass that recomputes it.
template <int N>
__device__ __forceinline__ void activate_slopes(int kind, const act *gate, i64 gate_stride, const act *up,
                                                i64 up_stride, const act *dy, i64 dy_stride, act *dgate,
                                                i64 dgate_stride, act *dup, i64 dup_stride, act *value,
                                                i64 value_stride, u32 spans_of_row, u32 spans) {
    u32 index = blockIdx.x * 2 * blockDim.x + threadIdx.x;
    float x[2][N], other[2][N], slope[2][N];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            Place place = place_of<N>(span, spans_of_row);
            load_span<N, act>(gate + place.row * gate_stride + place.column, x[k]);
            load_span<N, act>(up + place.row * up_stride + place.column, other[k]);
            load_span<N, act>(dy + place.row * dy_stride + place.column, slope[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 span = index + k * blockDim.x;
        if (span < spans) {
            Place place = place_of<N>(span, spans_of_row);
            float out_gate[N], out_up[N], out[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                Gate at = gate_of(kind, x[k][i]);
                float activated = x[k][i] * at.sigmoid;
                float derivative = at.sigmoid + activated * (1.0f - at.sigmoid) * at.slope_of_argument;
                out_gate[i] = slope[k][i] * other[k][i] * derivative;
                out_up[i] = slope[k][i] * activated;
                out[i] = activated * other[k][i];
            }
            store_span<N, act>(dgate + place.row * dgate_stride + place.column, out_gate);
            store_span<N, act>(dup + place.row * dup_stride + place.column, out_up);
            if (value != nullptr)
                store_span<N, act>(value + place.row * value_stride + place.column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_grad_eight(int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride, const act *dy,
                         i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride, act *value,
                         i64 value_stride, u32 spans_of_row, u32 spans) {
    activate_slopes<8>(kind, gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dgate_stride, dup, dup_stride,
                       value, value_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_grad_one(int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride, const act *dy,
                       i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride, act *value,
                       i64 value_stride, u32 spans_of_row, u32 spans) {
    activate_slopes<1>(kind, gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dgate_stride, dup, dup_stride,
                       value, value_stride, spans_of_row, spans);
}
