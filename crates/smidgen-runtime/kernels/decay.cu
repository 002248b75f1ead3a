// Log decays and steps of recurrent mixers, their gradients, and sums over the heads that share queries and keys.
//
// The formulas are those of `cpu/decay.rs`. There is one number per token and head. A null pointer stands for an input or a
// gradient that does not exist.

struct Decay {
    const act *a;
    i64 a_stride;
    const void *log_decay;
    int log_decay_dtype;
    const void *dt_bias;
    int dt_bias_dtype;
    const act *b;
    i64 b_stride;
    float least, most, write;
    int rows, heads;
};

struct Gate {
    float step, rate, slope, share;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ Gate gate_of(const Decay &x, i64 row, int head) {
    const float z = to_float(x.a[row * x.a_stride + head]) + stored_float(x.dt_bias, x.dt_bias_dtype, head);
    const float soft = z > 20.0f ? z : log1pf(expf(z));
    Gate gate;
    gate.step = fminf(fmaxf(soft, x.least), x.most);
    gate.rate = -expf(stored_float(x.log_decay, x.log_decay_dtype, head));
    gate.slope = soft >= x.least && soft <= x.most ? sigmoid(z) : 0.0f;
    gate.share = x.b == nullptr ? 0.0f : sigmoid(to_float(x.b[row * x.b_stride + head]));
    return gate;
}

extern "C" __global__ void __launch_bounds__(256) decay(Decay x, float *g, float *beta) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (i64)x.rows * x.heads)
        return;
    const Gate gate = gate_of(x, index / x.heads, (int)(index % x.heads));
    g[index] = gate.rate * gate.step;
    beta[index] = x.b == nullptr ? gate.step : x.write * gate.share;
}

// The gradient with respect to a, before it is rounded.
__device__ __forceinline__ float slope_of(const Decay &x, const Gate &gate, float dg, float dbeta) {
    return (gate.rate * dg + (x.b == nullptr ? dbeta : 0.0f)) * gate.slope;
}

extern "C" __global__ void __launch_bounds__(256)
    decay_grad(Decay x, const float *dg, const float *dbeta, act *da, i64 da_stride, act *db, i64 db_stride) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (i64)x.rows * x.heads)
        return;
    const i64 row = index / x.heads;
    const int head = (int)(index % x.heads);
    const Gate gate = gate_of(x, row, head);
    da[row * da_stride + head] = to_act(slope_of(x, gate, dg[index], dbeta[index]));
    if (db != nullptr)
        db[row * db_stride + head] = to_act(dbeta[index] * x.write * gate.share * (1.0f - gate.share));
}

// Adds to the gradients of the two vectors. Grid: heads.
extern "C" __global__ void __launch_bounds__(256)
    decay_vectors_grad(Decay x, const float *dg, const float *dbeta, float *dlog_decay, float *ddt_bias) {
    const int head = blockIdx.x;
    float of_decay = 0.0f, of_bias = 0.0f;
    for (int row = threadIdx.x; row < x.rows; row += 256) {
        const i64 index = (i64)row * x.heads + head;
        const Gate gate = gate_of(x, row, head);
        of_decay += dg[index] * gate.rate * gate.step;
        of_bias += slope_of(x, gate, dg[index], dbeta[index]);
    }
    of_decay = block_sum(of_decay);
    of_bias = block_sum(of_bias);
    if (threadIdx.x != 0)
        return;
    if (dlog_decay != nullptr)
        dlog_decay[head] += of_decay;
    if (ddt_bias != nullptr)
        ddt_bias[head] += of_bias;
}

// y (T, Hk · K) from x (T, Hk, group, K): the sum over the heads of a group, in order.
extern "C" __global__ void __launch_bounds__(256)
    sum_groups(const float *x, act *y, i64 y_stride, i64 rows, int key_heads, int group, int key_dim) {
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 columns = (i64)key_heads * key_dim;
    if (index >= rows * columns)
        return;
    const i64 row = index / columns;
    const int column = (int)(index % columns), key_head = column / key_dim, channel = column % key_dim;
    const float *from = x + ((row * key_heads + key_head) * group) * key_dim + channel;
    float sum = 0.0f;
    for (int head = 0; head < group; ++head)
        sum += from[(i64)head * key_dim];
    y[row * y_stride + column] = to_act(sum);
}
