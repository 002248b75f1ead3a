//! Measures a device: a small decoder is planned and run, every operation is timed, and rates are computed from that.
//!
//! The rate of a kind of work is its amount divided by its time, at the sizes of real training. Matmuls are timed with
//! many tokens and with few, because the difference is the cost of packing their matrices, and with a bf16 and a
//! quantized base, because the difference is the cost of decoding. Finally all rates are scaled so that the predicted
//! times add up to the measured time of the whole entry point, because operations that run back to back take a
//! different time than operations that are waited for one by one.
//! On a GPU the fixed time of an operation comes from a tiny decoder, whose time is mostly kernel launches. A device
//! slows down after some seconds of work, so the whole entry point is timed after a warm-up.
//! Left out: where the results are saved (`plan/profiles/saved.rs`).

use super::disk_rates;
use crate::bench::timing::{Batch, Bench};
use crate::failure::Failure;
use crate::plan::devices::JobDevice;
use crate::plan::job::{Job, Profiles};
use crate::plan::planning::plan_job;
use crate::plan::profiles::device_name;
use serde_json::{Value, json};
use smidgen_compile::{DeviceProfile, Profile, Rates, cards};
use smidgen_formats::model::Model;
use smidgen_ir::{BoundBy, Choice, Cost, Entry, Op, Pins, Precision};
use smidgen_recipe::{
    self as recipe, BaseFormat, Compute, DeviceChoice, Memory, ModelPath, Recipe, RecipePath,
};
use smidgen_runtime::AnyDevice;
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;
use smidgen_runtime::cpu::update_at::measure_update_rate;
use smidgen_runtime::cuda::transfer_rates::transfer_rates;
use std::path::Path;

/// How thoroughly to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The usual sizes of training.
    Full,
    /// The smallest meaningful sizes, for slow machines.
    Brief,
}

/// Measures a device, and the disk of `folder`, which is where runs would store offloaded tensors.
pub fn measure(
    place: &mut JobDevice,
    threads: usize,
    effort: Effort,
    folder: &Path,
) -> Result<DeviceProfile, Failure> {
    let name = device_name(place, threads)
        .ok_or_else(|| Failure::device("only a device of this machine can be measured"))?;
    match place {
        JobDevice::Cpu => measure_cpu(name, threads, effort, folder),
        JobDevice::Cuda { .. } | JobDevice::Elsewhere { .. } => {
            measure_cuda(name, place, threads, effort, folder)
        }
    }
}

fn measure_cpu(
    name: String,
    threads: usize,
    effort: Effort,
    folder: &Path,
) -> Result<DeviceProfile, Failure> {
    let usual = DeviceProfile::cpu(threads);
    // Enough layers that activations leave the CPU's caches before they are read, as in a real run.
    let (layers, large, small, passes, sustained_s) = match effort {
        Effort::Full => (8, (2, 256), (1, 64), 4, 3.0),
        Effort::Brief => (1, (2, 32), (1, 16), 2, 0.0),
    };
    let sizes = Sizes { config: cpu_shape, layers, large, small, repeats: 1, passes, sustained_s };
    let rates = |compute| {
        measure_rates(&Trial { device: DeviceChoice::Cpu, compute, base: BaseFormat::Bf16, threads }, &sizes)
    };
    let f32 = rates(Compute::F32)?;
    // Without bf16 instructions nothing is computed in bf16.
    let half = if Bf16Unit::detect().is_some() { rates(Compute::Bf16)? } else { f32 };
    let disk = disk_rates::measure(folder, disk_bytes(effort))?;
    let travel = disk.busy_s_per_byte.map(|seconds| seconds / threads as f64);
    Ok(DeviceProfile {
        name,
        f32,
        half,
        fetch_bytes_per_s: disk.read_bytes_per_s,
        stow_bytes_per_s: disk.write_bytes_per_s,
        disk_bytes_per_s: disk.read_bytes_per_s,
        transfer_s_per_byte: travel.unwrap_or(usual.transfer_s_per_byte),
        ..usual
    })
}

fn disk_bytes(effort: Effort) -> usize {
    if effort == Effort::Full { 256 << 20 } else { 8 << 20 }
}

fn measure_cuda(
    name: String,
    place: &mut JobDevice,
    threads: usize,
    effort: Effort,
    folder: &Path,
) -> Result<DeviceProfile, Failure> {
    const TRANSFER_BYTES: usize = 256 << 20;
    let JobDevice::Cuda { ordinal, facts: Some(facts), .. } = &*place else {
        return Err(Failure::device("only a device of this machine can be measured"));
    };
    let device = DeviceChoice::Cuda(*ordinal);
    let usual = cards::most_like(&facts.name, facts.capability, facts.total_bytes).profile();
    let memory_bytes = Some(facts.total_bytes);
    let is_roomy = facts.free_bytes.is_none_or(|free| free > 20 << 30);
    // The first device that a process opens measures the driver's context.
    let half =
        if facts.has_bf16() { (Compute::Bf16, BaseFormat::Bf16) } else { (Compute::F16, BaseFormat::F16) };
    let (fetch, stow) = match place.open_and_measure(threads, place.arithmetic(half.0))? {
        AnyDevice::Cuda(cuda) => transfer_rates(cuda.gpu(), TRANSFER_BYTES)?,
        AnyDevice::Cpu(_) => unreachable!("a GPU was opened"),
    };
    // Attention reaches its full rate only in long samples, and only there does it take much of the time.
    let (large, small) = match (effort, is_roomy) {
        (Effort::Full, true) => ((1, 8192), (1, 1024)),
        (Effort::Full, false) => ((1, 2048), (1, 512)),
        (Effort::Brief, _) => ((1, 512), (1, 256)),
    };
    let sizes =
        Sizes { config: cuda_shape, layers: 2, large, small, repeats: 8, passes: 3, sustained_s: 2.0 };
    let tiny = Sizes { config: cpu_shape, layers: 8, large: (1, 256), ..sizes };
    let rates = |compute, base, sizes: &Sizes| -> Result<Rates, Failure> {
        let trial = Trial { device, compute, base, threads };
        let rates = measure_rates(&trial, sizes)?;
        Ok(with_back_to_back_steps(&rates, &run(&trial, &tiny, tiny.large, 0.0)?))
    };
    let half = rates(half.0, half.1, &sizes)?;
    let f32 = rates(Compute::F32, BaseFormat::F32, &Sizes { large: (1, 1024), small: (1, 256), ..sizes })?;
    Ok(DeviceProfile {
        name,
        memory_bytes,
        overhead: place.overhead(),
        f32,
        half,
        fetch_bytes_per_s: fetch,
        stow_bytes_per_s: stow,
        disk_bytes_per_s: disk_rates::measure(folder, disk_bytes(effort))?.read_bytes_per_s,
        update_bytes_per_s: measure_update_rate(threads).map_err(Failure::device)?,
        ..usual
    })
}

/// Some layers of SmolLM2-135M, with a small vocabulary.
fn cpu_shape(layers: usize) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 8192, "tie_word_embeddings": true,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    })
}

/// Some layers of Qwen2.5-7B, with a small vocabulary.
fn cuda_shape(layers: usize) -> Value {
    json!({
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": layers,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 32768, "tie_word_embeddings": false,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "use_sliding_window": false, "hidden_act": "silu", "torch_dtype": "bfloat16",
    })
}

/// The sizes of the measured decoder and the number of repetitions.
#[derive(Clone, Copy)]
struct Sizes {
    /// Makes a config with this number of layers.
    config: fn(usize) -> Value,
    layers: usize,
    /// Samples and tokens per sample of the larger and the smaller batch.
    large: (usize, usize),
    small: (usize, usize),
    repeats: usize,
    passes: usize,
    /// Seconds of warm-up before the whole entry point is timed.
    sustained_s: f64,
}

/// The storage and precision of a measured decoder.
#[derive(Clone, Copy)]
struct Trial {
    device: DeviceChoice,
    compute: Compute,
    base: BaseFormat,
    threads: usize,
}

fn measure_rates(trial: &Trial, sizes: &Sizes) -> Result<Rates, Failure> {
    let of_base = |base| -> Result<BySize, Failure> {
        let trial = Trial { base, ..*trial };
        let large = run(&trial, sizes, sizes.large, sizes.sustained_s)?;
        Ok(BySize { large, small: run(&trial, sizes, sizes.small, 0.0)? })
    };
    let packs = trial.device == DeviceChoice::Cpu;
    let (plain, coded) = (of_base(trial.base)?, of_base(BaseFormat::Nf4)?);
    Ok(fit(&plain, &coded, packs))
}

/// A step with its measured time.
#[derive(Clone, Debug)]
struct Timed {
    op: Op,
    cost: Cost,
    seconds: f64,
}

/// The times of all operations of a plan, and of its whole `micro_step`.
#[derive(Clone, Debug, Default)]
struct Times {
    micro_step: Vec<Timed>,
    update: Vec<Timed>,
    whole_s: f64,
}

/// The times with many tokens and with few.
struct BySize {
    large: Times,
    small: Times,
}

/// Plans the decoder for a batch size and times it.
fn run(
    trial: &Trial,
    sizes: &Sizes,
    (samples, tokens): (usize, usize),
    sustained_s: f64,
) -> Result<Times, Failure> {
    let mut job = build_job(trial, sizes, samples, tokens)?;
    let device = job.place.open_and_measure(trial.threads, job.arithmetic)?;
    let planned = plan_job(&job)?;
    if !planned.fits {
        return Err(planned.refusal());
    }
    let batch = Batch { samples, tokens, together: samples };
    let mut bench = Bench::load(planned.solution.plan, device, batch, job.request.spec.vocabulary)?;
    let extent = bench.begin_micro_step();
    bench.time_entry(Entry::MicroStep, &extent)?;
    let entries = [Entry::MicroStep, Entry::Update];
    let mut steps = entries.map(|entry| {
        let planned = bench.executor.plan().entry(entry).steps.iter();
        planned
            .map(|step| Timed { op: step.op.clone(), cost: step.cost, seconds: f64::INFINITY })
            .collect::<Vec<Timed>>()
    });
    // The shortest of several times counts; longer ones were disturbed by other processes.
    let mut whole_s = f64::INFINITY;
    for _ in 0..sizes.passes {
        whole_s = whole_s.min(bench.time_entry(Entry::MicroStep, &extent)?);
        for (entry, steps) in entries.into_iter().zip(&mut steps) {
            let seconds = bench.time_each(entry, &extent, sizes.repeats)?;
            steps
                .iter_mut()
                .zip(seconds)
                .for_each(|(step, seconds)| step.seconds = step.seconds.min(seconds));
        }
    }
    if sustained_s > 0.0 {
        whole_s = sustained(sustained_s, || bench.time_entry(Entry::MicroStep, &extent))?;
    }
    let [micro_step, update] = steps;
    Ok(Times { micro_step, update, whole_s })
}

/// The job that trains this decoder without recompute and offloading.
fn build_job(trial: &Trial, sizes: &Sizes, samples: usize, tokens: usize) -> Result<Job, Failure> {
    let Trial { device, compute, base, threads } = *trial;
    const NAME: &str = "measured";
    let mut recipe = Recipe::new(ModelPath::folder(Path::new(NAME)));
    (recipe.model.base, recipe.model.compute) = (base, compute);
    recipe.data.max_tokens = tokens;
    recipe.train.batch = recipe::Batch::Samples(samples);
    let resident = [Choice::Recompute, Choice::Weights, Choice::Activations, Choice::OptimizerState];
    recipe.memory = Memory {
        device,
        threads,
        pins: resident.into_iter().fold(Pins::default(), |pins, choice| pins.without(choice)),
        ..recipe.memory
    };
    let most = (samples * tokens).to_string();
    recipe.set("memory.micro_tokens", &most, Path::new("")).map_err(Failure::recipe)?;
    recipe.output.dir = RecipePath::at(&std::env::temp_dir());
    let model = Model::from_config(NAME, (sizes.config)(sizes.layers));
    Job::prepare_model(recipe, model, Profiles::BuiltIn)
}

/// The median time of a run on a warm device: runs for `seconds`, of which the first half is warm-up.
fn sustained(seconds: f64, mut run: impl FnMut() -> Result<f64, Failure>) -> Result<f64, Failure> {
    let (mut spent_s, mut times_s) = (0.0, Vec::new());
    while spent_s < seconds || times_s.is_empty() {
        let took_s = run()?;
        if spent_s >= seconds / 2.0 {
            times_s.push(took_s);
        }
        spent_s += took_s;
    }
    times_s.sort_by(f64::total_cmp);
    Ok(times_s[times_s.len() / 2])
}

/// Fits rates so that the predicted times of all operations match the measured ones. `packs`: the device packs matrices
/// before it multiplies them.
fn fit(plain: &BySize, coded: &BySize, packs: bool) -> Rates {
    const TRAFFIC_BYTES: f64 = (1 << 20) as f64;
    let BySize { large, small } = plain;
    let of = |times: &Times, bound_by: BoundBy| -> Vec<Timed> {
        times.micro_step.iter().filter(|step| step.op.bound_by() == bound_by).cloned().collect()
    };
    let traffic: Vec<Timed> =
        of(large, BoundBy::Memory).into_iter().filter(|step| step.cost.bytes >= TRAFFIC_BYTES).collect();
    let traffic = if traffic.is_empty() { of(large, BoundBy::Memory) } else { traffic };
    // The shortest operation does almost no work, so its time is the fixed cost of an operation.
    let step_s = small.update.iter().map(|step| step.seconds).fold(f64::INFINITY, f64::min).clamp(1e-7, 1e-3);
    let bytes_per_s = rate(&traffic, |cost| cost.bytes, step_s);
    let matmuls = if packs { packed_matmuls } else { unpacked_matmuls };
    let MatmulTimes { flop_s, bf16_flop_s, plain_operand_s, coded_operand_s } = matmuls(plain, coded, step_s);
    let rates = Rates {
        matmul_flops_per_s: 1.0 / flop_s,
        bf16_matmul_flops_per_s: 1.0 / bf16_flop_s,
        weight_gradient_flops_per_s: rate(&of(large, BoundBy::OuterProduct), |cost| cost.flops, step_s),
        attention_flops_per_s: rate(&of(large, BoundBy::Attention), |cost| cost.flops, step_s),
        bytes_per_s,
        step_s,
        plain_operand_s,
        coded_operand_s,
    };
    let profile = Profile { rates, ..Profile::cpu(1, Precision::F32) };
    let wholes = if packs { vec![large, &coded.large] } else { vec![large] };
    let steps = wholes.iter().flat_map(|times| &times.micro_step);
    let predicted_s: f64 = steps.map(|step| profile.seconds(&step.op, step.cost)).sum();
    let whole_s: f64 = wholes.iter().map(|times| times.whole_s).sum();
    // A larger correction would come from a disturbance, not from the device.
    slower(&rates, (whole_s / predicted_s).clamp(0.7, 1.4))
}

/// Seconds of matmuls per FLOP and per element of a matrix.
struct MatmulTimes {
    flop_s: f64,
    bf16_flop_s: f64,
    plain_operand_s: f64,
    coded_operand_s: f64,
}

/// For a device that packs matrices before it multiplies them: with few tokens, packing is the excess over the FLOPs.
fn packed_matmuls(plain: &BySize, coded: &BySize, step_s: f64) -> MatmulTimes {
    let of_code = |times: &Times| {
        let (seconds, cost) = products(times, step_s, |cost| cost.coded_operands > 0.0);
        (seconds, cost.flops, cost.coded_operands)
    };
    let (flop_s, coded_operand_s) = two_rates(of_code(&coded.large), of_code(&coded.small));
    let of_bf16 = |times: &Times| {
        let (seconds, cost) = products(times, step_s, |_| true);
        let others_s = flop_s * (cost.flops - cost.bf16_flops);
        // Noise must not make it negative.
        ((seconds - others_s).max(0.1 * seconds), cost.bf16_flops, cost.plain_operands)
    };
    let (bf16_flop_s, plain_operand_s) = two_rates(of_bf16(&plain.large), of_bf16(&plain.small));
    MatmulTimes { flop_s, bf16_flop_s, plain_operand_s, coded_operand_s }
}

/// For a device that does not pack matrices: only decoding costs extra, which is the difference between a quantized and
/// a bf16 base.
fn unpacked_matmuls(plain: &BySize, coded: &BySize, step_s: f64) -> MatmulTimes {
    let [(large_s, of_large), (small_s, _), (coded_s, of_coded)] =
        [&plain.large, &plain.small, &coded.small].map(|times| products(times, step_s, |_| true));
    let flop_s = large_s / of_large.flops;
    let coded_operand_s = ((coded_s - small_s) / of_coded.coded_operands.max(1.0)).max(0.0);
    MatmulTimes { flop_s, bf16_flop_s: flop_s, plain_operand_s: 0.0, coded_operand_s }
}

/// Seconds of the matmuls for which `is_counted` holds, without their fixed cost, and the sum of their costs.
fn products(times: &Times, step_s: f64, is_counted: fn(&Cost) -> bool) -> (f64, Cost) {
    let of_products = times.micro_step.iter().filter(|step| step.op.bound_by() == BoundBy::Matmul);
    let steps: Vec<&Timed> = of_products.filter(|step| is_counted(&step.cost)).collect();
    let seconds = steps.iter().map(|step| step.seconds - step_s).sum();
    (seconds, steps.iter().map(|step| step.cost).sum())
}

/// The rates with the fixed cost of operations that run back to back, from a decoder whose operations do little work.
fn with_back_to_back_steps(rates: &Rates, tiny: &Times) -> Rates {
    let work = Profile { rates: Rates { step_s: 0.0, ..*rates }, ..Profile::cpu(1, Precision::F32) };
    let work_s: f64 = tiny.micro_step.iter().map(|step| work.seconds(&step.op, step.cost)).sum();
    let step_s = (tiny.whole_s - work_s) / tiny.micro_step.len().max(1) as f64;
    // Never more than the time of an operation that is waited for.
    Rates { step_s: step_s.clamp(1e-7, rates.step_s.max(1e-7)), ..*rates }
}

/// Work per second, without the fixed cost `step_s` of each operation.
fn rate(steps: &[Timed], done: impl Fn(&Cost) -> f64, step_s: f64) -> f64 {
    let seconds: f64 = steps.iter().map(|step| step.seconds - step_s).sum();
    let longest: f64 = steps.iter().map(|step| step.seconds).sum();
    // A wrong fixed cost must not make the rate infinite.
    steps.iter().map(|step| done(&step.cost)).sum::<f64>() / seconds.max(0.1 * longest).max(1e-12)
}

/// Solves `t = a·x + b·y` for the seconds per unit `a` and `b` of two kinds of work, given two measurements `(t, x,
/// y)`.
fn two_rates(one: (f64, f64, f64), other: (f64, f64, f64)) -> (f64, f64) {
    let ((t1, a1, b1), (t2, a2, b2)) = (one, other);
    let a = (t1 * b2 - t2 * b1) / (a1 * b2 - a2 * b1);
    let b = (t2 - a2 * a) / b2;
    // If noise makes the difference meaningless, all time counts as FLOPs.
    if a.is_finite() && b.is_finite() && a > 0.0 && b >= 0.0 { (a, b) } else { (t1 / a1, 0.0) }
}

/// Rates at which everything takes `by` times as long.
fn slower(rates: &Rates, by: f64) -> Rates {
    Rates {
        matmul_flops_per_s: rates.matmul_flops_per_s / by,
        bf16_matmul_flops_per_s: rates.bf16_matmul_flops_per_s / by,
        weight_gradient_flops_per_s: rates.weight_gradient_flops_per_s / by,
        attention_flops_per_s: rates.attention_flops_per_s / by,
        bytes_per_s: rates.bytes_per_s / by,
        step_s: rates.step_s * by,
        plain_operand_s: rates.plain_operand_s * by,
        coded_operand_s: rates.coded_operand_s * by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        matmul_flops_per_s: 180e9,
        bf16_matmul_flops_per_s: 270e9,
        weight_gradient_flops_per_s: 20e9,
        attention_flops_per_s: 100e9,
        bytes_per_s: 20e9,
        step_s: 4e-6,
        plain_operand_s: 0.7e-9,
        coded_operand_s: 0.9e-9,
    };

    /// Steps with the times that these rates predict.
    fn times(rates: &Rates, tokens: f64, is_coded: bool, whole: f64) -> Times {
        let profile = Profile { rates: *rates, ..Profile::cpu(1, Precision::F32) };
        let matrix = 576.0 * 1536.0;
        let (plain_operands, coded_operands) = if is_coded { (0.0, matrix) } else { (matrix, 0.0) };
        let bytes = 4.0 * tokens * 1536.0;
        let flops = 2.0 * tokens * matrix;
        let bf16_flops = if is_coded { 0.0 } else { flops };
        let product = Cost { flops, bf16_flops, bytes, plain_operands, coded_operands, ..Cost::default() };
        let cost = |flops, bytes| Cost { flops, bytes, ..Cost::default() };
        let shape = smidgen_ir::AttentionShape {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            scale: 1.0,
            window: None,
            softcap: None,
            sinks: false,
        };
        let steps = [
            (Op::Linear { bias: false, lora: None }, product),
            (Op::LinearGrad { scales: vec![1.0] }, product),
            (Op::WeightGrad { scale: 1.0 }, cost(2.0 * tokens * 16.0 * 576.0, bytes)),
            (Op::Attention(shape), cost(4.0 * tokens * 576.0 * 128.0, bytes)),
            (Op::Add { scale: 1.0 }, cost(0.0, 3.0 * bytes)),
        ];
        let timed = |(op, cost): &(Op, Cost)| Timed {
            op: op.clone(),
            cost: *cost,
            seconds: profile.seconds(op, *cost),
        };
        let micro_step: Vec<Timed> = steps.iter().map(timed).collect();
        let update = vec![timed(&(Op::Zero, cost(0.0, 0.0))), timed(&(Op::Zero, cost(0.0, 80e3)))];
        let sum: f64 = micro_step.iter().map(|step| step.seconds).sum();
        Times { micro_step, update, whole_s: sum * whole }
    }

    fn check(found: Rates, expected: Rates) {
        let all = |rates: Rates| {
            [
                rates.matmul_flops_per_s,
                rates.bf16_matmul_flops_per_s,
                rates.weight_gradient_flops_per_s,
                rates.attention_flops_per_s,
                rates.bytes_per_s,
                rates.step_s,
                rates.plain_operand_s,
                rates.coded_operand_s,
            ]
        };
        for (found, expected) in all(found).into_iter().zip(all(expected)) {
            let near = (found - expected).abs() <= 1e-3 * expected.abs();
            assert!(near, "{found:?} is not {expected:?}");
        }
    }

    /// Times with many tokens and with few; the whole entry point takes `whole` times the sum of its operations.
    fn by_size(rates: &Rates, is_coded: bool, whole: f64) -> BySize {
        BySize { large: times(rates, 1024.0, is_coded, whole), small: times(rates, 64.0, is_coded, 1.0) }
    }

    #[test]
    fn rates_are_found_again() {
        let of = |is_coded, whole| by_size(&RATES, is_coded, whole);
        check(fit(&of(false, 1.0), &of(true, 1.0), true), RATES);
        // If the whole takes a tenth longer than the sum of its steps, all rates are a tenth lower.
        check(fit(&of(false, 1.1), &of(true, 1.1), true), slower(&RATES, 1.1));
    }

    #[test]
    fn a_device_that_does_not_pack_matrices_only_pays_for_decoding() {
        let matmul_flops_per_s = RATES.bf16_matmul_flops_per_s;
        let gpu = Rates { matmul_flops_per_s, plain_operand_s: 0.0, coded_operand_s: 1e-9, ..RATES };
        check(fit(&by_size(&gpu, false, 1.0), &by_size(&gpu, true, 1.0), false), gpu);
    }

    #[test]
    fn a_device_is_timed_once_it_is_warm() {
        // The device gets slower, and the last run is disturbed.
        let mut runs = [0.5, 0.5, 0.6, 0.7, 0.6, 9.0].into_iter();
        let usual_s = sustained(3.0, || Ok(runs.next().unwrap())).unwrap();
        assert_eq!((usual_s, runs.next()), (0.7, None));
        // If the first run takes longer than the given time, it is the only one.
        let mut runs = [5.0, 6.0].into_iter();
        assert_eq!(sustained(3.0, || Ok(runs.next().unwrap())).unwrap(), 6.0);
    }

    #[test]
    fn back_to_back_steps_may_take_less_than_single_ones() {
        let back_to_back = Rates { step_s: 2e-6, ..RATES };
        let tiny = times(&back_to_back, 64.0, false, 1.0);
        check(with_back_to_back_steps(&RATES, &tiny), back_to_back);
        // Never more than single steps, even if disturbed.
        let disturbed = Times { whole_s: 10.0 * tiny.whole_s, ..tiny };
        check(with_back_to_back_steps(&RATES, &disturbed), RATES);
    }

    #[test]
    fn noise_leaves_rates_that_are_above_zero() {
        let disturbed = |is_coded| {
            let mut times = by_size(&RATES, is_coded, 1.0);
            times.small.micro_step.iter_mut().for_each(|step| step.seconds *= 0.01);
            times.small.update.iter_mut().for_each(|step| step.seconds = 0.0);
            times
        };
        let rates = fit(&disturbed(false), &disturbed(true), true);
        assert_eq!((rates.plain_operand_s, rates.coded_operand_s), (0.0, 0.0));
        assert!(rates.matmul_flops_per_s > 0.0 && rates.bf16_matmul_flops_per_s > 0.0);
        assert!(rates.bytes_per_s > 0.0 && rates.step_s > 0.0);
    }
}
