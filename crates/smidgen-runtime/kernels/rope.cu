// Rotary position embedding: a table of cosines and sines, and the rotation that uses it.
//
// Of a head's first `dim` channels, channel i of the first half (a) pairs with channel i of the second half (b), or, in
// the `_interleaved` kernels, channel 2i (a) with channel 2i + 1 (b). The channels after them stay unchanged.
//     a' = a cos - b sin        b' = b cos + a sin
// A rotation is orthogonal, so the gradient is the rotation by the opposite angle.
// Angles are position times frequency in f32, as in PyTorch. Cosine and sine are computed in f64, as on the CPU.
// A thread rotates eight pairs (one, if heads are not aligned) of up to four heads by the same angles, and loads all
// of them before it writes, so `y` may be `x`. Traffic in elements: 2, and the table once for each four heads.

#define LENGTHS_OF_NOTHING 0
#define LENGTHS_OF_SEGMENTS 1

// The length of the segment of a token. `boundaries` are ascending, and the last one is larger than every token.
__device__ __forceinline__ int segment_length(const int *boundaries, int count, int token) {
    int low = 0, high = count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (boundaries[middle] <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return boundaries[low] - boundaries[low - 1];
}

// How frequencies follow from lengths, and scales from positions.
struct TableRule {
    int original;
    float stretch;
    float scale, beta;
    int beta_original;
};

// Writes scale * cos(a) and scale * sin(a), with a = position * frequency, to the columns `first_pair` to `first_pair +
// 7` of both halves of table (T, 2 * half). A sequence of more than `original` tokens uses the long frequencies (l0 to
// l7), divided by a power of its length if `stretch` is not 0. `lengths` holds segment boundaries, or the length of each token's sequence. Frequencies are kernel arguments,
// eight at a time, so that no copy to the device is needed. A thread computes one of the eight for one token.
extern "C" __global__ void __launch_bounds__(256)
    rope_table_columns(const __grid_constant__ TableRule rule, const int *positions, const int *lengths,
                       int lengths_kind, int lengths_count, float *table, i64 table_stride, int half, int first_pair,
                       int tokens, float s0, float s1, float s2, float s3, float s4, float s5, float s6, float s7,
                       float l0, float l1, float l2, float l3, float l4, float l5, float l6, float l7) {
    int token = (int)((blockIdx.x * blockDim.x + threadIdx.x) / 8);
    int among = threadIdx.x % 8;
    int pair = first_pair + among;
    if (token >= tokens || pair >= half)
        return;
    bool is_long = false;
    int length = 0;
    if (lengths_kind != LENGTHS_OF_NOTHING) {
        length = lengths_kind == LENGTHS_OF_SEGMENTS ? segment_length(lengths, lengths_count, token) : lengths[token];
        is_long = length > rule.original;
    }
    const float of_short[8] = {s0, s1, s2, s3, s4, s5, s6, s7}, of_long[8] = {l0, l1, l2, l3, l4, l5, l6, l7};
    float frequency = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i == among)
            frequency = is_long ? of_long[i] : of_short[i];
    if (is_long && rule.stretch != 0.0f && pair > 0) {
        double growth = (double)rule.stretch * length / rule.original - ((double)rule.stretch - 1.0);
        frequency = (float)((double)frequency * pow(growth, -(2.0 * pair) / (2.0 * half - 2.0)));
    }
    float scale = rule.scale;
    if (rule.beta != 0.0f) {
        double whole = floor((double)positions[token] / rule.beta_original);
        scale *= (float)(1.0 + (double)rule.beta * log(1.0 + whole));
    }
    double sine, cosine;
    sincos((double)__fmul_rn((float)positions[token], frequency), &sine, &cosine);
    float *row = table + (i64)token * table_stride;
    row[pair] = (float)cosine * scale;
    row[half + pair] = (float)sine * scale;
}

#define HEADS_AT_ONCE 4

struct RotatedMatrix {
    const act *x;
    i64 x_stride;
    act *y;
    i64 y_stride;
    int heads;
    u32 units;
};

// One matrix or two, which are selected by `blockIdx.y`.
struct Rotation {
    RotatedMatrix matrices[2];
    const float *table;
    i64 table_stride;
    float direction;
    int head_dim, half;
    u32 units_of_head;
};

// A thread handles one unit of up to four heads of a token. The units are spans of pairs, and then spans of unrotated
// channels.
template <int N> __device__ __forceinline__ void rotate(const Rotation &all) {
    start_next();
    await_previous();
    const RotatedMatrix &own = all.matrices[blockIdx.y];
    const float *table = all.table;
    const i64 table_stride = all.table_stride;
    const int heads = own.heads, head_dim = all.head_dim, half = all.half;
    const u32 units_of_head = all.units_of_head;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= own.units)
        return;
    u32 quarters = (u32)ceil_div(heads, HEADS_AT_ONCE);
    u32 bundle = index / units_of_head;
    int channel = N * (int)(index - bundle * units_of_head);
    i64 token = bundle / quarters;
    int first_head = HEADS_AT_ONCE * (int)(bundle % quarters);
    const act *x = own.x + token * own.x_stride + (i64)first_head * head_dim;
    act *y = own.y + token * own.y_stride + (i64)first_head * head_dim;
    int count = min(heads - first_head, HEADS_AT_ONCE);
    if (channel >= half) {
        channel += half;
        for (int head = 0; head < count; ++head) {
            float unrotated[N];
            load_span<N, act>(x + head * head_dim + channel, unrotated);
            store_span<N, act>(y + head * head_dim + channel, unrotated);
        }
        return;
    }
    float a[HEADS_AT_ONCE][N], b[HEADS_AT_ONCE][N], cosine[N], sine[N];
#pragma unroll
    for (int head = 0; head < HEADS_AT_ONCE; ++head)
        if (head < count) {
            load_span<N, act>(x + head * head_dim + channel, a[head]);
            load_span<N, act>(x + head * head_dim + half + channel, b[head]);
        }
    load_span<N, float>(table + token * table_stride + channel, cosine);
    load_span<N, float>(table + token * table_stride + half + channel, sine);
#pragma unroll
    for (int head = 0; head < HEADS_AT_ONCE; ++head)
        if (head < count) {
            float out_a[N], out_b[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float signed_sine = sine[i] * all.direction;
                out_a[i] = a[head][i] * cosine[i] - b[head][i] * signed_sine;
                out_b[i] = b[head][i] * cosine[i] + a[head][i] * signed_sine;
            }
            store_span<N, act>(y + head * head_dim + channel, out_a);
            store_span<N, act>(y + head * head_dim + half + channel, out_b);
        }
}

extern "C" __global__ void __launch_bounds__(256) rope_eight(const __grid_constant__ Rotation all) { rotate<8>(all); }

extern "C" __global__ void __launch_bounds__(256) rope_one(const __grid_constant__ Rotation all) { rotate<1>(all); }

// As `rotate`, for pairs of neighbours: a unit is PAIRS pairs, or so many unrotated channels that a span is full.
template <int PAIRS> __device__ __forceinline__ void rotate_neighbours(const Rotation &all) {
    constexpr int UNROTATED = PAIRS == 4 ? 8 : 1;
    start_next();
    await_previous();
    const RotatedMatrix &own = all.matrices[blockIdx.y];
    const int heads = own.heads, head_dim = all.head_dim, half = all.half;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= own.units)
        return;
    u32 quarters = (u32)ceil_div(heads, HEADS_AT_ONCE);
    u32 bundle = index / all.units_of_head;
    int unit = (int)(index - bundle * all.units_of_head);
    i64 token = bundle / quarters;
    int first_head = HEADS_AT_ONCE * (int)(bundle % quarters);
    const act *x = own.x + token * own.x_stride + (i64)first_head * head_dim;
    act *y = own.y + token * own.y_stride + (i64)first_head * head_dim;
    int count = min(heads - first_head, HEADS_AT_ONCE);
    int pair = PAIRS * unit;
    if (pair >= half) {
        int channel = 2 * half + UNROTATED * (unit - half / PAIRS);
        for (int head = 0; head < count; ++head) {
            float unrotated[UNROTATED];
            load_span<UNROTATED, act>(x + head * head_dim + channel, unrotated);
            store_span<UNROTATED, act>(y + head * head_dim + channel, unrotated);
        }
        return;
    }
    const float *cosines = all.table + token * all.table_stride + pair;
    float cosine[PAIRS], sine[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        cosine[i] = cosines[i];
        sine[i] = cosines[half + i] * all.direction;
    }
    for (int head = 0; head < count; ++head) {
        const act *from = x + head * head_dim + 2 * pair;
        act *to = y + head * head_dim + 2 * pair;
        float in[2 * PAIRS], out[2 * PAIRS];
        if constexpr (PAIRS == 4) {
            load_eight<act>(from, in);
        } else {
            in[0] = to_float(from[0]);
            in[1] = to_float(from[1]);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            out[2 * i] = in[2 * i] * cosine[i] - in[2 * i + 1] * sine[i];
            out[2 * i + 1] = in[2 * i + 1] * cosine[i] + in[2 * i] * sine[i];
        }
        if constexpr (PAIRS == 4) {
            store_eight<act>(to, out);
        } else {
            to[0] = to_act(out[0]);
            to[1] = to_act(out[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_interleaved_eight(const __grid_constant__ Rotation all) {
    rotate_neighbours<4>(all);
}

extern "C" __global__ void __launch_bounds__(256) rope_interleaved_one(const __grid_constant__ Rotation all) {
    rotate_neighbours<1>(all);
}
