// Gated activations, act(gate) * up, and their gradients.
//
// Forward: y = a(x) u, where x is the gate and u is up. Both activations have the form a(x) = x s, s = sigmoid(z(x)):
//     SiLU            z = x
//     GELU, tanh form z = 2 sqrt(2/pi) (x + 0.044715 x^3), because (1 + tanh v) / 2 = sigmoid(2v)
// With s' = s (1 - s) z', the product rule gives a' = s + x s (1 - s) z'. So:
//     dup = dy a(x)          dgate = dy u a'(x)
// `kind` is 0 for SiLU, 1 for GELU.
// A thread handles two spans of eight channels (or two single channels, if rows are not aligned) and loads everything
// before it writes, so an output may be any one of the inputs. Traffic in elements: forward 3, gradient 5, gradient
// with the value 6. The `_round` kernels use one block per row and also round what they write to fp8; the bits are the
// same as those of a separate rounding kernel.

#define ACT_SILU 0

// s and z'.
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

// The position of span `index` in the matrix.
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

// dgate, dup and a(x) of one element.
struct GateSlopes {
    float gate, up, activated;
};

__device__ __forceinline__ GateSlopes slopes_of(int kind, float x, float other, float slope) {
    const Gate at = gate_of(kind, x);
    const float activated = x * at.sigmoid;
    const float derivative = at.sigmoid + activated * (1.0f - at.sigmoid) * at.slope_of_argument;
    return GateSlopes{slope * other * derivative, slope * activated, activated};
}

// If `value` is not null, it receives the forward result act(gate) * up, for a backward pass that recomputes it.
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
                const GateSlopes at = slopes_of(kind, x[k][i], other[k][i], slope[k][i]);
                out_gate[i] = at.gate;
                out_up[i] = at.up;
                out[i] = at.activated * other[k][i];
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

// ── with rounding to fp8 ─────────────────────────────────────────────────────────────────────────
// A thread keeps its part of a row, at most HELD spans, in registers.

extern "C" __global__ void __launch_bounds__(512, 2)
    gated_act_round(RoundedRows to, int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y,
                    i64 y_stride, int columns) {
    const i64 row = blockIdx.x;
    Eight<act> held[HELD], other[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (span_column(k) < columns) {
            held[k] = read_eight<act>(gate + row * gate_stride + span_column(k));
            other[k] = read_eight<act>(up + row * up_stride + span_column(k));
        }
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (span_column(k) < columns) {
            float x[8], times[8];
            unpack<act>(held[k], x);
            unpack<act>(other[k], times);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                x[i] = x[i] * gate_of(kind, x[i]).sigmoid * times[i];
            held[k] = pack<act>(x);
            write_eight<act>(y + row * y_stride + span_column(k), held[k]);
        }
    round_held(to, held, columns);
}

struct RoundedGate {
    RoundedRows gate, up; // `codes` is null if the gradient is not rounded
};

extern "C" __global__ void __launch_bounds__(512, 2)
    gated_act_grad_round(RoundedGate to, int kind, const act *gate, i64 gate_stride, const act *up, i64 up_stride,
                         const act *dy, i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride,
                         int columns) {
    const i64 row = blockIdx.x;
    Eight<act> of_gate[HELD], of_up[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (span_column(k) < columns) {
            float x[8], other[8], slope[8];
            load_eight<act>(gate + row * gate_stride + span_column(k), x);
            load_eight<act>(up + row * up_stride + span_column(k), other);
            load_eight<act>(dy + row * dy_stride + span_column(k), slope);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const GateSlopes at = slopes_of(kind, x[i], other[i], slope[i]);
                x[i] = at.gate;
                other[i] = at.up;
            }
            of_gate[k] = pack<act>(x);
            of_up[k] = pack<act>(other);
            write_eight<act>(dgate + row * dgate_stride + span_column(k), of_gate[k]);
            write_eight<act>(dup + row * dup_stride + span_column(k), of_up[k]);
        }
    if (to.gate.codes)
        round_held(to.gate, of_gate, columns);
    if (to.up.codes)
        round_held(to.up, of_up, columns);
}
