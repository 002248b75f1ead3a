// Cross entropy over the vocabulary; the logits are replaced by their gradient. For a row of logits l:
//     z = l, or z = c tanh(l / c) with a softcap c
//     nll = ln(sum exp z) - z[label]         loss += weight * nll
//     d nll / dz = softmax(z) - onehot(label)        dz / dl = 1 - tanh(l / c)^2 = 1 - (z / c)^2, or 1 without a cap
//     dl = weight * (softmax(z) - onehot(label)) * dz / dl
// One block per row. The first pass finds the largest logit and the sum together: a thread that finds a larger logit
// rescales its sum. The second pass, the only one that writes, goes backwards, so that the logits read last are still
// in the cache. The kernel moves 2 to 3 bf16 per logit: 8192 rows of 152064 are 5.0 to 7.5 GB, 1.2 to 1.8 ms at 4.2
// TB/s. Sums are f32 within a thread and f64 across threads. Further below, two kernels do the same for the words of
// one piece of the head.

#define LOSS_THREADS 512
#define LOSS_IN_FLIGHT 4
#define IGNORED_LABEL (-100)

#if defined(ACT_F32)
__device__ __forceinline__ float power_of_e(float x) { return expf(x); }
#else
// Relative error 2^-22 or so for x near 0, growing with |x|: far below the rounding of 16-bit logits.
__device__ __forceinline__ float power_of_e(float x) { return __expf(x); }
#endif

struct NoCap {
    __device__ __forceinline__ float of(float logit) const { return logit; }
    __device__ __forceinline__ float slope(float) const { return 1.0f; }
};

struct SoftCap {
    float cap, inverse;

    __device__ __forceinline__ float of(float logit) const {
        return __fmul_rn(tanhf(__fmul_rn(logit, inverse)), cap);
    }

    // dz / dl, from the capped logit z.
    __device__ __forceinline__ float slope(float z) const {
        const float t = __fmul_rn(z, inverse);
        return (1.0f - t) * (1.0f + t);
    }
};

// Replaces a largest logit of -infinity by 0, so that differences are not NaN.
__device__ __forceinline__ float reference(float largest) { return largest == -infinity() ? 0.0f : largest; }

struct RunningSum {
    float largest, sum;
};

template <int COUNT> __device__ __forceinline__ void take(RunningSum &running, const float (&z)[COUNT]) {
    float largest = running.largest;
#pragma unroll
    for (int at = 0; at < COUNT; ++at)
        largest = fmaxf(largest, z[at]);
    const float from = reference(largest);
    float sum = running.sum;
    if (largest > running.largest)
        sum *= power_of_e(running.largest - from);
#pragma unroll
    for (int at = 0; at < COUNT; ++at)
        sum += power_of_e(z[at] - from);
    running.largest = largest;
    running.sum = sum;
}

struct RowSoftmax {
    float largest, inverse_sum, scale;
    i32 label;

    // The gradient of the logit in column `column`.
    template <typename Cap> __device__ __forceinline__ float gradient(const Cap &cap, float logit, i32 column) const {
        const float z = cap.of(logit);
        float y = power_of_e(z - largest) * inverse_sum;
        if (column == label)
            y -= 1.0f;
        return y * scale * cap.slope(z);
    }
};

// The largest logit and the sum over one thread's columns; `groups` of eight are read at once.
template <typename Cap>
__device__ __forceinline__ RunningSum sum_of_row(const act *row, i32 vocabulary, i32 groups, const Cap &cap) {
    RunningSum running = {-infinity(), 0.0f};
    for (i32 first = threadIdx.x; first < groups; first += LOSS_THREADS * LOSS_IN_FLIGHT) {
        Eight<act> raw[LOSS_IN_FLIGHT];
#pragma unroll
        for (int at = 0; at < LOSS_IN_FLIGHT; ++at)
            if (first + at * LOSS_THREADS < groups)
                raw[at] = read_eight<act>(row + (i64)(first + at * LOSS_THREADS) * 8);
#pragma unroll
        for (int at = 0; at < LOSS_IN_FLIGHT; ++at) {
            if (first + at * LOSS_THREADS >= groups)
                break;
            float z[8];
            unpack<act>(raw[at], z);
#pragma unroll
            for (int element = 0; element < 8; ++element)
                z[element] = cap.of(z[element]);
            take(running, z);
        }
    }
    for (i32 column = groups * 8 + threadIdx.x; column < vocabulary; column += LOSS_THREADS) {
        const float z[1] = {cap.of(to_float(row[column]))};
        take(running, z);
    }
    return running;
}

// Replaces logits by gradients, from the end to the start.
template <typename Cap>
__device__ __forceinline__ void gradients_of_row(act *row, i32 vocabulary, i32 groups, const RowSoftmax &softmax,
                                                 const Cap &cap) {
    const i32 turns = ceil_div(groups, LOSS_THREADS * LOSS_IN_FLIGHT);
    for (i32 turn = turns - 1; turn >= 0; --turn) {
        const i32 first = turn * (LOSS_THREADS * LOSS_IN_FLIGHT) + (i32)threadIdx.x;
        Eight<act> raw[LOSS_IN_FLIGHT];
#pragma unroll
        for (int at = 0; at < LOSS_IN_FLIGHT; ++at)
            if (first + at * LOSS_THREADS < groups)
                raw[at] = read_eight<act>(row + (i64)(first + at * LOSS_THREADS) * 8);
#pragma unroll
        for (int at = 0; at < LOSS_IN_FLIGHT; ++at) {
            const i32 group = first + at * LOSS_THREADS;
            if (group >= groups)
                break;
            float z[8];
            unpack<act>(raw[at], z);
#pragma unroll
            for (int element = 0; element < 8; ++element)
                z[element] = softmax.gradient(cap, z[element], group * 8 + element);
            store_eight<act>(row + (i64)group * 8, z);
        }
    }
    for (i32 column = groups * 8 + threadIdx.x; column < vocabulary; column += LOSS_THREADS)
        row[column] = to_act(softmax.gradient(cap, to_float(row[column]), column));
}

__device__ __forceinline__ void clear_row(act *row, i32 vocabulary, i32 groups) {
    const float zeros[8] = {};
    for (i32 group = threadIdx.x; group < groups; group += LOSS_THREADS)
        store_eight<act>(row + (i64)group * 8, zeros);
    for (i32 column = groups * 8 + threadIdx.x; column < vocabulary; column += LOSS_THREADS)
        row[column] = to_act(0.0f);
}

// The weight of a row: its own, or the one that all rows have.
__device__ __forceinline__ float weight_of_row(const double *weight, const float *row_weights) {
    return row_weights ? row_weights[blockIdx.x] : (float)*weight;
}

// Without `gradient` the logits stay unchanged. A label that is neither ignored nor in the
// vocabulary gives a NaN loss.
template <typename Cap>
__device__ __forceinline__ void loss_of_row(act *row, i32 vocabulary, i32 eight, i32 label, const double *weight,
                                            const float *row_weights, float *row_loss, const Cap &cap, i32 gradient) {
    const i32 groups = eight ? vocabulary / 8 : 0;
    if (label == IGNORED_LABEL) {
        if (gradient)
            clear_row(row, vocabulary, groups);
        if (threadIdx.x == 0)
            *row_loss = 0.0f;
        return;
    }

    const RunningSum running = sum_of_row(row, vocabulary, groups, cap);

    // The logit of the label is read before the barriers in `block_max`, so before any thread writes.
    const bool known = (u32)label < (u32)vocabulary;
    const float labelled = known ? cap.of(to_float(row[label])) : __int_as_float(0x7fc00000);
    const float largest = reference(block_max(running.largest));
    // A thread without columns has the sum 0 and the factor e^(-infinity).
    const double sum = block_sum((double)(running.sum * power_of_e(running.largest - largest)));

    if (gradient) {
        const RowSoftmax softmax = {largest, (float)(1.0 / sum), weight_of_row(weight, row_weights), label};
        gradients_of_row(row, vocabulary, groups, softmax, cap);
    }
    if (threadIdx.x == 0)
        *row_loss = (float)((double)largest + log(sum) - (double)labelled);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    softmax_loss(act *logits, i64 stride, i32 vocabulary, i32 eight, const i32 *labels, const double *weight,
                 const float *row_weights, float *row_losses, i32 gradient) {
    const NoCap cap;
    loss_of_row(logits + (i64)blockIdx.x * stride, vocabulary, eight, labels[blockIdx.x], weight,
                row_weights, row_losses + blockIdx.x, cap, gradient);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    softmax_loss_capped(act *logits, i64 stride, i32 vocabulary, i32 eight, const i32 *labels, const double *weight,
                        const float *row_weights, float *row_losses, i32 gradient, float softcap) {
    const SoftCap cap = {softcap, 1.0f / softcap};
    loss_of_row(logits + (i64)blockIdx.x * stride, vocabulary, eight, labels[blockIdx.x], weight,
                row_weights, row_losses + blockIdx.x, cap, gradient);
}

// loss += weight * the sum of rows, by one block, in an order that depends only on their number. With a weight for each
// row, the sum has these weights.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    sum_losses(const float *row_losses, i32 rows, const double *weight, const float *row_weights, double *loss) {
    double sum = 0.0;
    for (i32 row = threadIdx.x; row < rows; row += LOSS_THREADS)
        sum += (double)row_losses[row] * (row_weights ? (double)row_weights[row] : 1.0);
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *loss += row_weights ? sum : sum * *weight;
}

// ── a head in pieces ─────────────────────────────────────────────────────────────────────────────
// Rows have the logits of `words` words of the vocabulary. `sums` has three f32 per row over all pieces so far: the
// largest logit, the sum of exp(logit - largest), and the logit of the label, which is NaN until a piece contains it.

struct HeadRow {
    act *row;
    i32 words, groups, label, column;

    __device__ __forceinline__ HeadRow(act *logits, i64 stride, i32 words, i32 eight, const i32 *labels, i32 first_word)
        : row(logits + (i64)blockIdx.x * stride), words(words), groups(eight ? words / 8 : 0),
          label(labels[blockIdx.x]), column(label - first_word) {}

    __device__ __forceinline__ bool has_label() const { return label >= 0 && (u32)column < (u32)words; }
};

// `before` is null for the first piece. It may be the same as `sums`, because only this block uses the sums of its row.
template <typename Cap>
__device__ __forceinline__ void sums_of_row(const HeadRow &head, const float *before, float *sums, const Cap &cap) {
    float *own = sums + (i64)blockIdx.x * 3;
    if (head.label == IGNORED_LABEL) {
        if (threadIdx.x == 0)
            own[0] = 0.0f, own[1] = 1.0f, own[2] = 0.0f;
        return;
    }
    float largest_before = -infinity(), sum_before = 0.0f, labelled = __int_as_float(0x7fc00000);
    if (before) {
        const float *from = before + (i64)blockIdx.x * 3;
        largest_before = from[0], sum_before = from[1], labelled = from[2];
    }
    if (head.has_label())
        labelled = cap.of(to_float(head.row[head.column]));
    const RunningSum running = sum_of_row(head.row, head.words, head.groups, cap);
    // After the barriers in `block_max`, all threads have read the earlier sums.
    const float largest = fmaxf(largest_before, block_max(running.largest));
    const float from = reference(largest);
    double sum = block_sum((double)(running.sum * power_of_e(running.largest - from)));
    sum += (double)sum_before * (double)power_of_e(largest_before - from);
    if (threadIdx.x == 0)
        own[0] = largest, own[1] = (float)sum, own[2] = labelled;
}

template <typename Cap>
__device__ __forceinline__ void head_gradients_of_row(const HeadRow &head, const double *weight,
                                                      const float *row_weights, const float *sums, const Cap &cap) {
    if (head.label == IGNORED_LABEL) {
        clear_row(head.row, head.words, head.groups);
        return;
    }
    const float *own = sums + (i64)blockIdx.x * 3;
    // If the label is in another piece, no column matches it.
    const i32 column = head.has_label() ? head.column : -1;
    const RowSoftmax softmax = {reference(own[0]), (float)(1.0 / (double)own[1]), weight_of_row(weight, row_weights),
                                column};
    gradients_of_row(head.row, head.words, head.groups, softmax, cap);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    head_sums(act *logits, i64 stride, i32 words, i32 eight, const i32 *labels, i32 first_word, const float *before,
              float *sums) {
    const NoCap cap;
    sums_of_row(HeadRow(logits, stride, words, eight, labels, first_word), before, sums, cap);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    head_sums_capped(act *logits, i64 stride, i32 words, i32 eight, const i32 *labels, i32 first_word,
                     const float *before, float *sums, float softcap) {
    const SoftCap cap = {softcap, 1.0f / softcap};
    sums_of_row(HeadRow(logits, stride, words, eight, labels, first_word), before, sums, cap);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    head_grad(act *logits, i64 stride, i32 words, i32 eight, const i32 *labels, i32 first_word, const double *weight,
              const float *row_weights, const float *sums) {
    const NoCap cap;
    head_gradients_of_row(HeadRow(logits, stride, words, eight, labels, first_word), weight, row_weights, sums, cap);
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    head_grad_capped(act *logits, i64 stride, i32 words, i32 eight, const i32 *labels, i32 first_word,
                     const double *weight, const float *row_weights, const float *sums, float softcap) {
    const SoftCap cap = {softcap, 1.0f / softcap};
    head_gradients_of_row(HeadRow(logits, stride, words, eight, labels, first_word), weight, row_weights, sums, cap);
}

// loss += weight * the sum of the row losses, by one block; the row losses are written unless the pointer is null.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    head_loss(const float *sums, i32 rows, const double *weight, const float *row_weights, double *loss,
              float *row_losses) {
    double sum = 0.0;
    for (i32 row = threadIdx.x; row < rows; row += LOSS_THREADS) {
        const float *own = sums + (i64)row * 3;
        const float nll = (float)((double)reference(own[0]) + log((double)own[1]) - (double)own[2]);
        if (row_losses)
            row_losses[row] = nll;
        sum += (double)nll * (row_weights ? (double)row_weights[row] : 1.0);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *loss += row_weights ? sum : sum * *weight;
}

// Rounds f32 sums to activations; one block handles some columns of a row.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    round_rows(const float *from, i64 from_stride, act *to, i64 to_stride, i32 columns) {
    const i32 column = blockIdx.y * LOSS_THREADS + threadIdx.x;
    if (column < columns)
        to[(i64)blockIdx.x * to_stride + column] = to_act(from[(i64)blockIdx.x * from_stride + column]);
}

// Writes logits as f32: z, or cap·tanh(z/cap) if the cap is above 0; one element per thread.
template <typename T>
__device__ __forceinline__ void finish_logits(const T *from, i64 from_stride, float *to, i64 to_stride, i32 columns,
                                              float cap) {
    const i32 column = blockIdx.x * LOSS_THREADS + threadIdx.x;
    if (column >= columns)
        return;
    const float logit = to_float(from[(i64)blockIdx.y * from_stride + column]);
    const SoftCap soft = {cap, 1.0f / cap};
    to[(i64)blockIdx.y * to_stride + column] = cap > 0.0f ? soft.of(logit) : logit;
}

extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    logits_of_act(const act *from, i64 from_stride, float *to, i64 to_stride, i32 columns, float cap) {
    finish_logits<act>(from, from_stride, to, to_stride, columns, cap);
}

// `from` may be `to`.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    logits_of_f32(const float *from, i64 from_stride, float *to, i64 to_stride, i32 columns, float cap) {
    finish_logits<float>(from, from_stride, to, to_stride, columns, cap);
}
