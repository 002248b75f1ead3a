// Training objectives: log-probabilities of rows become a loss, figures, and a weight for every row. The formulas and
// their derivation are in `src/cpu/objective.rs`, which is the reference; all arithmetic is f64.
// A micro-batch has few sequences, so these kernels are simple: sums over the rows of a sequence by one block, curves by
// one thread per pair or sequence, and totals by one thread per figure, in the order of the sequences.

#define OBJECTIVE_THREADS 256
#define IN_COLUMNS 5     // numbers of a sequence that the host writes
#define COLUMNS 16       // numbers of a sequence that these kernels keep
#define FIGURES 8

// Columns of the host's numbers.
#define SKIPPED 0
#define REFERENCE 1
#define SHARE 2
#define ROLE 3
#define DIVERGENCE 4

// Columns of the kept numbers; the figures come last.
#define SUM 0            // log p of the completion
#define COUNT 1          // its tokens
#define NLL 2            // NLL of all supervised rows
#define MEAN_RATIO 3     // mean of log p - old log p
#define SLOPE 4          // dL / dlp of the completion's rows
#define SKIPPED_SLOPE 5  // the same for the rows before it
#define LOSS 6
#define FIGURE 8

// Columns of the log-probabilities before.
#define BEFORE_COLUMNS 2

#define MEASURE_SUM 0
#define MEASURE_MEAN 1
#define MEASURE_ODDS 2
#define CURVE_LOGISTIC 0
#define CURVE_HINGE 1
#define CURVE_SQUARE 2

__device__ __forceinline__ double softplus(double z) { return fmax(z, 0.0) + log1p(exp(-fabs(z))); }
__device__ __forceinline__ double sigmoid(double z) {
    return z >= 0.0 ? 1.0 / (1.0 + exp(-z)) : exp(z) / (1.0 + exp(z));
}

struct Measured {
    double plain, value, slope;
};

__device__ __forceinline__ Measured measure_of(const double *own, const double *given, i32 measure) {
    const double sum = own[SUM], count = own[COUNT], reference = given[REFERENCE];
    if (measure == MEASURE_SUM)
        return {sum, sum - reference, 1.0};
    if (measure == MEASURE_MEAN)
        return {sum / count, (sum - reference) / count, 1.0 / count};
    const double mean = sum / count;
    const double rest = mean < -0.6931471805599453 ? log1p(-exp(mean)) : log(-expm1(mean));
    return {mean, mean - rest, 1.0 / (count * -expm1(mean))};
}

// AlphaPO's (1 - e^(-alpha v)) / alpha; `slope` is multiplied by its derivative.
__device__ __forceinline__ double transformed(double value, double alpha, double *slope) {
    if (alpha == 0.0)
        return value;
    *slope *= exp(-alpha * value);
    return -expm1(-alpha * value) / alpha;
}

__device__ __forceinline__ double log_ratio(const float *nll, const float *before, i32 row) {
    const float old = before ? before[(i64)row * BEFORE_COLUMNS] : __int_as_float(0x7fc00000);
    return isnan(old) ? 0.0 : -(double)nll[row] - (double)old;
}

// The sums of one sequence; one block per sequence.
extern "C" __global__ void __launch_bounds__(OBJECTIVE_THREADS)
    objective_sums(const float *nll, const i32 *first_rows, const double *given, const float *before, double *kept) {
    const double *numbers = given + (i64)blockIdx.x * IN_COLUMNS;
    const i32 start = first_rows[blockIdx.x], end = first_rows[blockIdx.x + 1];
    const i32 first = start + (i32)numbers[SKIPPED];
    double all = 0.0, sum = 0.0, ratio = 0.0;
    for (i32 row = start + (i32)threadIdx.x; row < end; row += OBJECTIVE_THREADS) {
        all += (double)nll[row];
        if (row >= first) {
            sum -= (double)nll[row];
            ratio += log_ratio(nll, before, row);
        }
    }
    all = block_sum(all);
    sum = block_sum(sum);
    ratio = block_sum(ratio);
    double *own = kept + (i64)blockIdx.x * COLUMNS;
    if (threadIdx.x < COLUMNS) {
        double value = 0.0;
        if (threadIdx.x == SUM)
            value = sum;
        else if (threadIdx.x == COUNT)
            value = (double)(end - first);
        else if (threadIdx.x == NLL)
            value = all;
        else if (threadIdx.x == MEAN_RATIO)
            value = ratio / (double)(end - first);
        own[threadIdx.x] = value;
    }
}

// Adds one term of the loss of pairs; one thread per pair.
extern "C" __global__ void objective_pair_term(const double *given, double *kept, i32 pairs, i32 measure, i32 curve,
                                               double weight, double scale, double shift, double right, double wrong,
                                               double alpha) {
    const i32 pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= pairs)
        return;
    double *own[2];
    Measured side[2];
    for (i32 at = 0; at < 2; ++at) {
        own[at] = kept + (i64)(2 * pair + at) * COLUMNS;
        side[at] = measure_of(own[at], given + (i64)(2 * pair + at) * IN_COLUMNS, measure);
        side[at].value = transformed(side[at].value, alpha, &side[at].slope);
    }
    const double share = given[(i64)(2 * pair) * IN_COLUMNS + SHARE];
    const double margin = side[0].value - side[1].value;
    const double z = scale * margin - shift;
    double value, slope;
    if (curve == CURVE_LOGISTIC) {
        value = right * softplus(-z) + wrong * softplus(z);
        slope = wrong * sigmoid(z) - right * sigmoid(-z);
    } else if (curve == CURVE_HINGE) {
        value = z < 1.0 ? 1.0 - z : 0.0 * z;
        slope = z < 1.0 ? -1.0 : 0.0;
    } else {
        value = z * z;
        slope = 2.0 * z;
    }
    own[0][LOSS] += share * weight * value;
    own[0][SLOPE] += share * weight * slope * scale * side[0].slope;
    own[1][SLOPE] -= share * weight * slope * scale * side[1].slope;
    if (measure == MEASURE_ODDS) {
        own[0][FIGURE + 6] += share * -softplus(-margin);
        own[0][FIGURE + 7] += share * margin;
    }
}

// Adds the negative log-likelihood of chosen sequences, and the figures; one thread per pair.
extern "C" __global__ void objective_pair_end(const double *given, double *kept, i32 pairs, double nll_factor, i32 measure,
                                              double beta, double alpha) {
    const i32 pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= pairs)
        return;
    const double *numbers = given + (i64)(2 * pair) * IN_COLUMNS;
    double *chosen = kept + (i64)(2 * pair) * COLUMNS;
    const double share = numbers[SHARE], nll = chosen[NLL] * numbers[ROLE];
    const double slope = -nll_factor * numbers[ROLE];
    chosen[LOSS] += nll_factor * nll;
    chosen[SLOPE] += slope;
    chosen[SKIPPED_SLOPE] = slope;
    double reward[2];
    for (i32 at = 0; at < 2; ++at) {
        Measured side = measure_of(chosen + at * COLUMNS, numbers + at * IN_COLUMNS, measure);
        reward[at] = beta * transformed(side.value, alpha, &side.slope);
        chosen[FIGURE + at] = share * reward[at];
        chosen[FIGURE + 2 + at] = share * side.plain;
    }
    chosen[FIGURE + 4] = reward[0] > reward[1] ? share : 0.0;
    chosen[FIGURE + 5] = nll_factor == 0.0 ? 0.0 : nll;
}

// KTO; one thread per sequence.
extern "C" __global__ void objective_label(const double *given, double *kept, i32 sequences, double beta,
                                           double desirable, double undesirable, i32 compares_divergence) {
    const i32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= sequences)
        return;
    const double *numbers = given + (i64)index * IN_COLUMNS;
    double *own = kept + (i64)index * COLUMNS;
    const bool is_desirable = numbers[ROLE] > 0.0;
    const double sign = is_desirable ? 1.0 : -1.0, weight = is_desirable ? desirable : undesirable;
    const double ratio = own[SUM] - numbers[REFERENCE];
    const double divergence = compares_divergence ? numbers[DIVERGENCE] : 0.0;
    const double right = sigmoid(sign * beta * (ratio - divergence));
    own[LOSS] = numbers[SHARE] * weight * (1.0 - right);
    own[SLOPE] = -numbers[SHARE] * weight * right * (1.0 - right) * sign * beta;
    own[FIGURE + (is_desirable ? 0 : 1)] = beta * ratio;
    own[FIGURE + (is_desirable ? 2 : 3)] = own[SUM];
}

// Writes the weights of the rows of a sequence whose tokens share one slope; one block per sequence.
extern "C" __global__ void __launch_bounds__(OBJECTIVE_THREADS)
    objective_weights(const i32 *first_rows, const double *given, const double *kept, const double *weight,
                      float *weights) {
    const i32 start = first_rows[blockIdx.x], end = first_rows[blockIdx.x + 1];
    const i32 first = start + (i32)given[(i64)blockIdx.x * IN_COLUMNS + SKIPPED];
    const double *own = kept + (i64)blockIdx.x * COLUMNS;
    for (i32 row = start + (i32)threadIdx.x; row < end; row += OBJECTIVE_THREADS)
        weights[row] = (float)(-own[row < first ? SKIPPED_SLOPE : SLOPE] * *weight);
}

struct Ratio {
    double value, slope;
};

// -min(r A, clip(r) A) and its derivative with respect to r.
__device__ __forceinline__ Ratio clipped_policy(double ratio, double advantage, double low, double high, double delta) {
    const double clip = fmin(fmax(ratio, 1.0 - low), 1.0 + high);
    const double one = fmin(ratio, delta) * advantage, other = clip * advantage;
    const double slope = ratio <= delta ? -advantage : 0.0, clip_slope = clip == ratio ? -advantage : 0.0;
    if (one < other)
        return {-one, slope};
    if (other < one)
        return {-other, clip_slope};
    return {-one, 0.5 * (slope + clip_slope)};
}

// GRPO: weights, loss and figures of a sequence; one block per sequence.
extern "C" __global__ void __launch_bounds__(OBJECTIVE_THREADS)
    objective_answer(const float *nll, const i32 *first_rows, const double *given, const float *before, double *kept,
                     const double *weight, float *weights, i32 by_sequence, double low, double high, double delta,
                     double beta, i32 corrects_penalty) {
    const double *numbers = given + (i64)blockIdx.x * IN_COLUMNS;
    const i32 start = first_rows[blockIdx.x], end = first_rows[blockIdx.x + 1];
    const i32 first = start + (i32)numbers[SKIPPED];
    double *own = kept + (i64)blockIdx.x * COLUMNS;
    const double share = numbers[SHARE], advantage = numbers[ROLE], count = own[COUNT], mean = own[MEAN_RATIO];
    double total = 0.0, penalties = 0.0, lows = 0.0, highs = 0.0;
    for (i32 row = start + (i32)threadIdx.x; row < end; row += OBJECTIVE_THREADS) {
        if (row < first)
            continue;
        const double ratio = exp(by_sequence ? mean : log_ratio(nll, before, row));
        total += clipped_policy(ratio, advantage, low, high, delta).value;
        if (!by_sequence || row == first) {
            lows += ratio < 1.0 - low && advantage < 0.0 ? 1.0 : 0.0;
            highs += ratio > 1.0 + high && advantage > 0.0 ? 1.0 : 0.0;
        }
        if (beta > 0.0) {
            const double gap = (double)before[(i64)row * BEFORE_COLUMNS + 1] + (double)nll[row];
            penalties += (exp(gap) - gap - 1.0) * (corrects_penalty ? ratio : 1.0);
        }
    }
    total = block_sum(total);
    penalties = block_sum(penalties);
    lows = block_sum(lows);
    highs = block_sum(highs);
    for (i32 row = start + (i32)threadIdx.x; row < end; row += OBJECTIVE_THREADS) {
        if (row < first) {
            weights[row] = 0.0f;
            continue;
        }
        const double ratio = exp(by_sequence ? mean : log_ratio(nll, before, row));
        double slope = clipped_policy(ratio, advantage, low, high, delta).slope * ratio;
        if (beta > 0.0) {
            const double gap = (double)before[(i64)row * BEFORE_COLUMNS + 1] + (double)nll[row];
            const double factor = corrects_penalty ? ratio : 1.0;
            slope += beta * factor * (1.0 - exp(gap));
            if (corrects_penalty)
                slope += beta * (by_sequence ? penalties / count : (exp(gap) - gap - 1.0) * factor);
        }
        weights[row] = (float)(-share * slope * *weight);
    }
    if (threadIdx.x == 0) {
        own[LOSS] = share * (total + beta * penalties);
        own[FIGURE] = penalties;
        own[FIGURE + 1] = lows;
        own[FIGURE + 2] = highs;
    }
}

// Adds the loss and the figures of all sequences, in their order; one thread per sum.
extern "C" __global__ void objective_total(const double *kept, i32 sequences, const double *weight, double *loss,
                                           double *figures) {
    const i32 column = threadIdx.x;
    if (column > FIGURES)
        return;
    const double *from = kept + (column == FIGURES ? LOSS : FIGURE + column);
    double sum = 0.0;
    for (i32 index = 0; index < sequences; ++index)
        sum += from[(i64)index * COLUMNS];
    if (column == FIGURES)
        *loss += *weight * sum;
    else
        figures[column] += sum;
}
