// Gated activations, act(gate) * up, and their gradients.
//
// Forward: y = a(x) b(u), where x is the gate and u is up. Most activations have the form a(x) = m s, s = sigmoid(z(m)):
//     SiLU            m = x              z = m
//     GELU, tanh form m = x              z = 2 sqrt(2/pi) (m + 0.044715 m^3), because (1 + tanh v) / 2 = sigmoid(2v)
//     clamped SwiGLU  m = min(x, limit)  z = alpha m
// With s' = s (1 - s) z', the product rule gives a' = s + m s (1 - s) z', which is 0 where the gate is clamped. The
// others are GELU, x F(x) with the distribution function F of the standard normal distribution, and the sigmoid itself.
// b(u) is u, or u clamped to +-limit plus 1 in the clamped SwiGLU. So:
//     dup = dy a(x) b'(u)          dgate = dy b(u) a'(x)
// The kinds are numbered as below.
// A thread handles two spans of eight channels (or two single channels, if rows are not aligned) and loads everything
// before it writes, so an output may be any one of the inputs. Traffic in elements: forward 3, gradient 5, gradient
// with the value 6. The `_round` kernels use one block per row and also round what they write to fp8; the bits are the
// same as those of a separate rounding kernel. In the `_groups` kernels, a gate is that of several neighbouring channels.

#define ACT_SILU 0
#define ACT_GELU_TANH 1
#define ACT_GELU 2
#define ACT_SIGMOID 3
#define ACT_CLAMPED 4
#define ACT_IDENTITY 5

struct Gating {
    int kind;
    float limit, alpha;
};

// A factor of the result, and its derivative.
struct Factor {
    float value, slope;
};

__device__ __forceinline__ float sigmoid(float x) { return __frcp_rn(1.0f + expf(-x)); }

// a(x)
__device__ __forceinline__ Factor gate_factor(const Gating &by, float x) {
    if (by.kind == ACT_IDENTITY)
        return Factor{x, 1.0f};
    if (by.kind == ACT_SIGMOID) {
        const float s = sigmoid(x);
        return Factor{s, s * (1.0f - s)};
    }
    if (by.kind == ACT_GELU) {
        const float share = normcdff(x);
        return Factor{x * share, share + x * 0.39894228f * expf(-0.5f * x * x)};
    }
    float m = x, z = x, slope_of_z = 1.0f;
    if (by.kind == ACT_GELU_TANH) {
        const float twice_slope = 1.5957692f, cubic = 0.044715f, square = x * x;
        z = twice_slope * (x + cubic * (square * x));
        slope_of_z = twice_slope * (1.0f + 3.0f * cubic * square);
    } else if (by.kind == ACT_CLAMPED) {
        m = x > by.limit ? by.limit : x;
        z = by.alpha * m;
        slope_of_z = by.alpha;
    }
    const float s = sigmoid(z), value = m * s;
    const bool is_flat = by.kind == ACT_CLAMPED && x > by.limit;
    return Factor{value, is_flat ? 0.0f : s + value * (1.0f - s) * slope_of_z};
}

// b(u). Comparisons with NaN are false: it stays NaN.
__device__ __forceinline__ Factor up_factor(const Gating &by, float u) {
    if (by.kind != ACT_CLAMPED)
        return Factor{u, 1.0f};
    const float below = u > by.limit ? by.limit : u;
    const bool is_flat = u > by.limit || u < -by.limit;
    return Factor{1.0f + (below < -by.limit ? -by.limit : below), is_flat ? 0.0f : 1.0f};
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
__device__ __forceinline__ void activate(const Gating &by, const act *gate, i64 gate_stride, const act *up, i64 up_stride,
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
                out[i] = gate_factor(by, x[k][i]).value * up_factor(by, other[k][i]).value;
            store_span<N, act>(y + place.row * y_stride + place.column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_eight(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y, i64 y_stride,
                    u32 spans_of_row, u32 spans) {
    activate<8>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_one(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y, i64 y_stride,
                  u32 spans_of_row, u32 spans) {
    activate<1>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans);
}

// dgate, dup and the result of one element.
struct GateSlopes {
    float gate, up, result;
};

__device__ __forceinline__ GateSlopes slopes_of(const Gating &by, float x, float other, float slope) {
    const Factor gate = gate_factor(by, x), up = up_factor(by, other);
    return GateSlopes{slope * up.value * gate.slope, slope * gate.value * up.slope, gate.value * up.value};
}

// If `value` is not null, it receives the forward result act(gate) * up, for a backward pass that recomputes it.
template <int N>
__device__ __forceinline__ void activate_slopes(const Gating &by, const act *gate, i64 gate_stride, const act *up,
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
                const GateSlopes at = slopes_of(by, x[k][i], other[k][i], slope[k][i]);
                out_gate[i] = at.gate;
                out_up[i] = at.up;
                out[i] = at.result;
            }
            store_span<N, act>(dgate + place.row * dgate_stride + place.column, out_gate);
            store_span<N, act>(dup + place.row * dup_stride + place.column, out_up);
            if (value != nullptr)
                store_span<N, act>(value + place.row * value_stride + place.column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_grad_eight(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride, const act *dy,
                         i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride, act *value,
                         i64 value_stride, u32 spans_of_row, u32 spans) {
    activate_slopes<8>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dgate_stride, dup, dup_stride,
                       value, value_stride, spans_of_row, spans);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_grad_one(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride, const act *dy,
                       i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride, act *value,
                       i64 value_stride, u32 spans_of_row, u32 spans) {
    activate_slopes<1>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dgate_stride, dup, dup_stride,
                       value, value_stride, spans_of_row, spans);
}

// ── with rounding to fp8 ─────────────────────────────────────────────────────────────────────────
// A thread keeps its part of a row, at most HELD spans, in registers.

extern "C" __global__ void __launch_bounds__(512, 2)
    gated_act_round(RoundedRows to, int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride, act *y,
                    i64 y_stride, int columns) {
    const Gating by{kind, limit, alpha};
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
                x[i] = gate_factor(by, x[i]).value * up_factor(by, times[i]).value;
            held[k] = pack<act>(x);
            write_eight<act>(y + row * y_stride + span_column(k), held[k]);
        }
    round_held(to, held, columns);
}

struct RoundedGate {
    RoundedRows gate, up; // `codes` is null if the gradient is not rounded
};

extern "C" __global__ void __launch_bounds__(512, 2)
    gated_act_grad_round(RoundedGate to, int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up, i64 up_stride,
                         const act *dy, i64 dy_stride, act *dgate, i64 dgate_stride, act *dup, i64 dup_stride,
                         int columns) {
    const Gating by{kind, limit, alpha};
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
                const GateSlopes at = slopes_of(by, x[i], other[i], slope[i]);
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

// ── a gate for several channels ──────────────────────────────────────────────────────────────────

template <int N>
__device__ __forceinline__ void activate_group(const Gating &by, const act *gate, i64 gate_stride, const act *up,
                                               i64 up_stride, act *y, i64 y_stride, u32 spans_of_row, u32 spans,
                                               int width) {
    const u32 span = blockIdx.x * blockDim.x + threadIdx.x;
    if (span >= spans)
        return;
    const Place place = place_of<N>(span, spans_of_row);
    const float factor = gate_factor(by, to_float(gate[place.row * gate_stride + place.column / width])).value;
    float value[N];
    load_span<N, act>(up + place.row * up_stride + place.column, value);
#pragma unroll
    for (int i = 0; i < N; ++i)
        value[i] = factor * up_factor(by, value[i]).value;
    store_span<N, act>(y + place.row * y_stride + place.column, value);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_groups_eight(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up,
                           i64 up_stride, act *y, i64 y_stride, u32 spans_of_row, u32 spans, int width) {
    activate_group<8>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans,
                      width);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_act_groups_one(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up,
                         i64 up_stride, act *y, i64 y_stride, u32 spans_of_row, u32 spans, int width) {
    activate_group<1>(Gating{kind, limit, alpha}, gate, gate_stride, up, up_stride, y, y_stride, spans_of_row, spans,
                      width);
}

// A warp has one gate and its channels. Every lane reads the gate before one of them overwrites it.
extern "C" __global__ void __launch_bounds__(256)
    gated_act_grad_groups(int kind, float limit, float alpha, const act *gate, i64 gate_stride, const act *up,
                          i64 up_stride, const act *dy, i64 dy_stride, act *dgate, i64 dgate_stride, act *dup,
                          i64 dup_stride, int gates, int width, u32 items) {
    const Gating by{kind, limit, alpha};
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (item >= items)
        return;
    const i64 row = item / gates;
    const int group = (int)(item % gates), first = group * width;
    const Factor factor = gate_factor(by, to_float(gate[row * gate_stride + group]));
    float sum = 0.0f;
    for (int channel = lane; channel < width; channel += WARP) {
        const Factor other = up_factor(by, to_float(up[row * up_stride + first + channel]));
        const float slope = to_float(dy[row * dy_stride + first + channel]);
        sum += slope * other.value;
        dup[row * dup_stride + first + channel] = to_act(slope * factor.value * other.slope);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        dgate[row * dgate_stride + group] = to_act(sum * factor.slope);
}
