//! Examples of the optimizer step: norm, clipping, AdamW and zeroing, against f64 references over several steps.
//!
//! They also show that a gradient or a loss that is not finite changes no parameter and no moment.

use crate::examples::{Example, Proof};
use crate::finite_difference::check_gradient;
use crate::numbers::{Content, decode_doubles, decode_reals, random_reals};
use crate::subject::{Scalar, Subject, plain_request};
use smidgen_compile::Request;
use smidgen_compile::leaves::train_leaf;
use smidgen_compile::names::{input, state};
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::update::append_update;
use smidgen_ir::{
    ACTIVITY_COLUMNS, AdamW, DType, Entry, Extent, Graph, LeafKind, Op, Phase, Shape, Storage, Type, ValueId,
    verify,
};
use smidgen_runtime::cpu::pool::Pool;
use smidgen_runtime::cpu::update_at::UpdateAt;
use smidgen_runtime::{Cpu, Executor};
use std::collections::BTreeSet;

/// The first leaf is smaller than a vector. The last is cut into chunks with a remainder and is large enough for 8 bits;
/// the others are not.
const LEAVES: [(usize, usize); 3] = [(1, 3), (7, 13), (129, 131)];
const SETTINGS: AdamW = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
const EXTENT: Extent = Extent { tokens: 1, rows: 1, segments: 1, audio: 0 };

pub fn examples() -> Vec<Example> {
    let covers: &[&str] = &["grad_norm", "adamw", "zero"];
    let covers_8_bit: &[&str] = &["grad_norm", "adamw", "adamw_8bit", "zero"];
    vec![
        Example { covers, proof: Proof::Values(without_clipping) },
        Example { covers, proof: Proof::Values(with_active_clipping) },
        Example { covers, proof: Proof::Values(with_idle_clipping) },
        Example { covers, proof: Proof::Values(a_scaled_loss_changes_nothing) },
        Example { covers, proof: Proof::Values(what_is_not_finite_changes_nothing) },
        Example { covers: covers_8_bit, proof: Proof::Values(in_8_bits_without_clipping) },
        Example { covers: covers_8_bit, proof: Proof::Values(in_8_bits_with_active_clipping) },
        Example { covers: covers_8_bit, proof: Proof::Values(what_is_not_finite_changes_nothing_in_8_bits) },
        Example { covers: covers_8_bit, proof: Proof::Values(activity_is_tracked_per_tensor) },
        Example { covers: &["adamw_on_host"], proof: Proof::Values(on_the_host) },
        Example { covers: &["adamw", "widen", "round_at_random"], proof: Proof::Values(in_bf16) },
        Example { covers: &["fourier_reg"], proof: Proof::Values(regularizer_of_coefficients) },
    ]
}

/// Updates of host memory give the same bytes as updates on a device.
fn on_the_host() -> BTreeSet<&'static str> {
    for moments in [Moments::F32, Moments::Bits8] {
        let update = Update::new(moments, 0.5);
        let mut executor = update.load(2);
        let mut host: Option<Vec<Vec<u8>>> = None;
        let pool = Pool::new(3).unwrap();
        for step in 1..=3 {
            let kinds = [LeafKind::Adapter, LeafKind::Moment];
            let host = host.get_or_insert_with(|| update.memory(&mut executor, &kinds));
            let gradients = gradients(step);
            let report = update.step(&mut executor, 2.5, step, &gradients);
            let hyper = [learning_rate(step), step as f64, 1.0];
            for (leaf, gradient) in gradients.iter().enumerate() {
                let mut activity = [0f32; ACTIVITY_COLUMNS];
                let address = |host: &mut Vec<Vec<u8>>, index: usize| host[index].as_mut_ptr();
                let moment = LEAVES.len() + 2 * leaf;
                let in_8_bits = moments.storage("parameter", gradient.len()) != [Storage::F32; 2];
                let on_host = UpdateAt {
                    settings: SETTINGS,
                    elements: gradient.len(),
                    in_8_bits,
                    gradient: gradient.as_ptr(),
                    report: report.as_ptr(),
                    hyper: hyper.as_ptr(),
                    parameter: address(host, leaf).cast(),
                    moments: [address(host, moment), address(host, moment + 1)],
                    activity: activity.as_mut_ptr(),
                };
                // SAFETY: vectors of these sizes, which nothing else uses; allocators align them for f32.
                unsafe { on_host.run(&pool) };
                assert!(activity[0] > 0.0 && activity[2] == 1.0, "{activity:?}");
            }
            assert!(*host == update.memory(&mut executor, &kinds), "{moments:?}: step {step} differs");
        }
    }
    ["adamw_on_host"].into()
}

/// Matrices in bf16 become a bf16 next to the f32 result, and equal it on average.
fn in_bf16() -> BTreeSet<&'static str> {
    let master = Master::Bf16 { seed: 9 };
    let update = Update::with_master(Moments::F32, master, 0.0);
    let mut executors = [1, 2, 4].map(|threads| update.load(threads));
    for step in 1..=5 {
        let before = update.memory(&mut executors[0], &[LeafKind::Adapter, LeafKind::Moment]);
        let gradients = gradients(step);
        let states = executors.each_mut().map(|executor| {
            update.step(executor, 2.5, step, &gradients);
            update.memory(executor, &[LeafKind::Adapter, LeafKind::Moment])
        });
        assert!(states[0] == states[1] && states[0] == states[2], "threads disagree at step {step}");
        let bf16 = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks::<2>().0.iter().map(|two| half::bf16::from_le_bytes(*two).to_f32()).collect()
        };
        // The moments of each leaf follow all leaves.
        let last = LEAVES.len() - 1;
        let mut reference = Reference::new(&bf16(&before[last]));
        let [first, second] = [1, 2].map(|moment| decode_reals(&before[last + 2 * last + moment]));
        let wide = |reals: Vec<f32>| reals.into_iter().map(f64::from).collect::<Vec<f64>>();
        (reference.first, reference.second) = (wide(first), wide(second));
        reference.step(&gradients[last], 1.0, step);
        let (mut moved, mut expected) = (0.0, 0.0);
        for ((got, want), before) in
            bf16(&states[0][last]).iter().zip(&reference.parameter).zip(&reference.start)
        {
            let distance = (f64::from(*got) - want).abs();
            assert!(distance <= want.abs() / 128.0 + 1e-9, "{got} for {want}");
            moved += f64::from(*got) - before;
            expected += want - before;
        }
        let count = reference.start.len() as f64;
        assert!((moved - expected).abs() / count < 1e-4, "{moved} for {expected} in {count}");
    }
    update.operations()
}

fn without_clipping() -> BTreeSet<&'static str> {
    several_steps(Moments::F32, 0.0, |factor| factor == 1.0)
}

fn with_active_clipping() -> BTreeSet<&'static str> {
    several_steps(Moments::F32, 0.5, |factor| factor < 0.1)
}

fn with_idle_clipping() -> BTreeSet<&'static str> {
    several_steps(Moments::F32, 1e4, |factor| factor == 1.0)
}

fn in_8_bits_without_clipping() -> BTreeSet<&'static str> {
    several_steps(Moments::Bits8, 0.0, |factor| factor == 1.0)
}

fn in_8_bits_with_active_clipping() -> BTreeSet<&'static str> {
    several_steps(Moments::Bits8, 0.5, |factor| factor < 0.1)
}

/// A run of the update entry point and the leaves around it.
struct Update {
    subject: Subject,
    loss: ValueId,
    report: ValueId,
    hyper: ValueId,
}

impl Update {
    fn new(moments: Moments, clip: f32) -> Update {
        Update::with_master(moments, Master::F32, clip)
    }

    fn with_master(moments: Moments, master: Master, clip: f32) -> Update {
        let mut graph = Graph::default();
        let mut contents = Vec::new();
        for (index, (rows, columns)) in LEAVES.into_iter().enumerate() {
            let ty = Type::new(Shape::matrix(rows, columns), master.storage(2));
            let id = graph.add_leaf(format!("parameter {index}"), ty, LeafKind::Adapter);
            train_leaf(&mut graph, id);
            contents.push((id, Content::Reals(random_reals(index as u64, rows * columns))));
        }
        let mut doubles = |name: &str, n: usize, kind: LeafKind| {
            graph.add_leaf(name, Type::new(Shape::vector(n), Storage::Plain(DType::F64)), kind)
        };
        let loss = doubles(state::LOSS, 1, LeafKind::State);
        let report = doubles(state::REPORT, 4, LeafKind::State);
        let hyper = doubles(input::HYPER, 3, LeafKind::Input);
        graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Update, vec![])];
        let optimizer = Optimizer { adamw: SETTINGS, moments, master, clip };
        append_update(&mut graph, &Request { optimizer, ..plain_request() });
        verify::expect_sound("update", &verify::graph(&graph));
        contents.push((hyper, Content::Doubles(vec![1e-3, 1.0, 1.0])));
        let scalar = Scalar::Loss { entry: Entry::Update, leaf: loss };
        let subject = Subject { name: "update".into(), graph, extent: EXTENT, contents, scalar };
        subject.run_on_null(subject.plan(EXTENT, 2)).unwrap();
        Update { subject, loss, report, hyper }
    }

    fn load(&self, threads: usize) -> Executor<Cpu> {
        self.subject.load(self.subject.plan(EXTENT, threads), threads)
    }

    /// Runs one update from the given gradients and returns the report.
    fn step(&self, executor: &mut Executor<Cpu>, loss: f64, step: u64, gradients: &[Vec<f32>]) -> Vec<f64> {
        self.scaled_step(executor, loss, step, gradients, 1.0)
    }

    /// Like `step`, with a scaled loss and scaled gradients.
    fn scaled_step(
        &self,
        executor: &mut Executor<Cpu>,
        loss: f64,
        step: u64,
        gradients: &[Vec<f32>],
        scale: f64,
    ) -> Vec<f64> {
        executor.write(self.loss, &loss.to_le_bytes());
        executor.write(self.hyper, &[learning_rate(step), step as f64, scale].map(f64::to_le_bytes).concat());
        for ((_, gradient), values) in self.subject.trained().into_iter().zip(gradients) {
            self.subject.write_reals(executor, gradient, values);
        }
        executor.run(Entry::Update, &EXTENT).unwrap();
        decode_doubles(&self.subject.read_bytes(executor, self.report))
    }

    /// The bytes of all leaves of these kinds.
    fn memory(&self, executor: &mut Executor<Cpu>, kinds: &[LeafKind]) -> Vec<Vec<u8>> {
        let values = self.subject.graph.values.iter().enumerate();
        values
            .filter(|(_, value)| value.leaf().is_some_and(|leaf| kinds.contains(&leaf.kind)))
            .map(|(index, _)| self.subject.read_bytes(executor, ValueId(index as u32)))
            .collect()
    }

    fn activity(&self, executor: &mut Executor<Cpu>) -> Vec<f32> {
        let values = &self.subject.graph.values;
        let leaf = values.iter().position(|value| value.name == state::ACTIVITY).unwrap();
        decode_reals(&self.subject.read_bytes(executor, ValueId(leaf as u32)))
    }

    fn operations(&self) -> BTreeSet<&'static str> {
        self.subject.graph.nodes(Entry::Update).iter().map(|node| node.op.name()).collect()
    }
}

fn learning_rate(step: u64) -> f64 {
    2e-2 / step as f64
}

fn gradients(step: u64) -> Vec<Vec<f32>> {
    let sizes = LEAVES.into_iter().enumerate();
    sizes.map(|(index, (rows, columns))| random_reals(100 * step + index as u64, rows * columns)).collect()
}

fn several_steps(moments: Moments, clip: f32, expected_factor: fn(f64) -> bool) -> BTreeSet<&'static str> {
    let update = Update::new(moments, clip);
    let mut executors = [1, 2, 4].map(|threads| update.load(threads));
    let start = LEAVES.into_iter().enumerate();
    let mut parameters: Vec<Reference> = start
        .map(|(index, (rows, columns))| Reference::new(&random_reals(index as u64, rows * columns)))
        .collect();
    for step in 1..=5 {
        let gradients = gradients(step);
        let all = || gradients.iter().flatten().map(|value| f64::from(*value));
        let norm = all().map(|value| value * value).sum::<f64>().sqrt();
        let factor = if clip > 0.0 { (f64::from(clip) / (norm + 1e-6)).min(1.0) } else { 1.0 };
        assert!(expected_factor(factor), "the example clips by {factor}");
        for (reference, gradient) in parameters.iter_mut().zip(&gradients) {
            reference.track_activity(gradient, factor);
            reference.step(gradient, factor, step);
        }
        let states = executors.each_mut().map(|executor| {
            let report = update.step(executor, 2.5, step, &gradients);
            assert_eq!((report[0], report[3]), (2.5, 1.0));
            assert!((report[1] - norm).abs() <= 1e-12 * norm, "norm {} against {norm}", report[1]);
            assert!((report[2] - factor).abs() <= 1e-12, "factor {} against {factor}", report[2]);
            let zeroed = update.memory(executor, &[LeafKind::Gradient]);
            assert!(zeroed.iter().flatten().all(|byte| *byte == 0), "gradients are zero afterwards");
            let loss = update.subject.read_bytes(executor, update.loss);
            assert_eq!(decode_doubles(&loss), [0.0], "the loss is zero afterwards");
            update.memory(executor, &[LeafKind::Adapter, LeafKind::Moment])
        });
        assert!(states[0] == states[1] && states[0] == states[2], "threads disagree at step {step}");
    }
    let got = update.memory(&mut executors[0], &[LeafKind::Adapter]);
    for (reference, got) in parameters.iter().zip(&got) {
        let in_8_bits = moments.storage("parameter", reference.start.len()) != [Storage::F32; 2];
        let error = reference.largest_error(&decode_reals(got));
        // f32 rounds parameters near 1 by 6e-8 per step; a code is within 5 % of most moments.
        assert!(error < if in_8_bits { 2e-3 } else { 1e-6 }, "{moments:?}: off by {error}");
        assert!(!in_8_bits || error > 1e-5, "{moments:?}: off by only {error}");
    }
    for executor in &mut executors {
        let activity = update.activity(executor);
        for (reference, row) in parameters.iter().zip(activity.as_chunks::<ACTIVITY_COLUMNS>().0) {
            let [gradient, parameter, moved] = row.map(f64::from);
            assert!((gradient - reference.largest_gradient).abs() <= 1e-6 * gradient, "{gradient}");
            assert!((parameter - reference.largest_parameter).abs() <= 1e-3 * parameter, "{parameter}");
            assert_eq!(moved, 1.0);
        }
    }
    update.operations()
}

/// A tensor of zeros without a gradient does not change, because weight decay keeps zeros.
fn activity_is_tracked_per_tensor() -> BTreeSet<&'static str> {
    for moments in [Moments::F32, Moments::Bits8] {
        let update = Update::new(moments, 0.0);
        let mut executor = update.load(2);
        let (still, _) = update.subject.trained()[2];
        update.subject.write_reals(&mut executor, still, &[0.0; 129 * 131]);
        let mut gradients = gradients(1);
        gradients[2].fill(0.0);
        update.step(&mut executor, 2.5, 1, &gradients);
        let activity = update.activity(&mut executor);
        assert!(activity[..6].iter().all(|number| *number > 0.0), "{moments:?}: {activity:?}");
        assert_eq!(activity[6..], [0.0; 3], "{moments:?}");
    }
    Update::new(Moments::Bits8, 0.0).operations()
}

/// AdamW with decoupled decay, in f64.
struct Reference {
    largest_gradient: f64,
    largest_parameter: f64,
    start: Vec<f64>,
    parameter: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
}

impl Reference {
    fn new(start: &[f32]) -> Reference {
        let start: Vec<f64> = start.iter().map(|value| f64::from(*value)).collect();
        let zeros = vec![0.0; start.len()];
        let (first, second) = (zeros.clone(), zeros);
        let parameter = start.clone();
        Reference { largest_gradient: 0.0, largest_parameter: 0.0, parameter, start, first, second }
    }

    /// Called before a step.
    fn track_activity(&mut self, gradient: &[f32], factor: f64) {
        let clipped = gradient.iter().map(|value| f64::from(*value).abs() * factor);
        self.largest_gradient = clipped.fold(self.largest_gradient, f64::max);
        let parameters = self.parameter.iter().map(|value| value.abs());
        self.largest_parameter = parameters.fold(self.largest_parameter, f64::max);
    }

    fn step(&mut self, gradient: &[f32], factor: f64, step: u64) {
        let (beta1, beta2) = (SETTINGS.beta1, SETTINGS.beta2);
        let (lr, decay) = (learning_rate(step), SETTINGS.weight_decay);
        for (index, gradient) in gradient.iter().enumerate() {
            let g = f64::from(*gradient) * factor;
            self.first[index] = beta1 * self.first[index] + (1.0 - beta1) * g;
            self.second[index] = beta2 * self.second[index] + (1.0 - beta2) * g * g;
            let first = self.first[index] / (1.0 - beta1.powf(step as f64));
            let second = self.second[index] / (1.0 - beta2.powf(step as f64));
            let kept = self.parameter[index] * (1.0 - lr * decay);
            self.parameter[index] = kept - lr * first / (second.sqrt() + SETTINGS.eps);
        }
    }

    fn largest_error(&self, got: &[f32]) -> f64 {
        let moved = self.parameter.iter().zip(&self.start).map(|(now, before)| (now - before).abs());
        assert!(moved.fold(0.0, f64::max) > 1e-2, "the reference hardly changed");
        assert!(got.iter().all(|value| value.is_finite()), "a parameter is not finite");
        let errors = got.iter().zip(&self.parameter).map(|(got, want)| (f64::from(*got) - want).abs());
        errors.fold(0.0, f64::max)
    }
}

/// A power of two in loss and gradients changes no bit of the result, clipped or not.
fn a_scaled_loss_changes_nothing() -> BTreeSet<&'static str> {
    const SCALE: f32 = 4096.0;
    for (moments, clip) in [(Moments::F32, 0.0), (Moments::F32, 0.5), (Moments::Bits8, 0.5)] {
        let update = Update::new(moments, clip);
        let [mut plain, mut scaled] = [update.load(2), update.load(2)];
        for step in 1..=3 {
            let mut gradients = gradients(step);
            let want = update.step(&mut plain, 2.5, step, &gradients);
            gradients.iter_mut().flatten().for_each(|value| *value *= SCALE);
            let scale = f64::from(SCALE);
            let got = update.scaled_step(&mut scaled, 2.5 * scale, step, &gradients, scale);
            assert_eq!(got, [want[0], want[1], want[2] / scale, want[3]]);
        }
        let kinds = [LeafKind::Adapter, LeafKind::Moment];
        assert!(
            update.memory(&mut plain, &kinds) == update.memory(&mut scaled, &kinds),
            "{moments:?} {clip}"
        );
    }
    Update::new(Moments::F32, 0.5).operations()
}

fn what_is_not_finite_changes_nothing() -> BTreeSet<&'static str> {
    what_is_not_finite(Moments::F32)
}

fn what_is_not_finite_changes_nothing_in_8_bits() -> BTreeSet<&'static str> {
    what_is_not_finite(Moments::Bits8)
}

fn what_is_not_finite(moments: Moments) -> BTreeSet<&'static str> {
    let update = Update::new(moments, 1.0);
    let kept = [LeafKind::Adapter, LeafKind::Moment];
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut executor = update.load(2);
        update.step(&mut executor, 1.0, 1, &gradients(1));
        let before = update.memory(&mut executor, &kept);
        let mut broken = gradients(2);
        let last = broken.len() - 1;
        broken[last][1000] = bad;
        let report = update.step(&mut executor, 1.0, 2, &broken);
        assert_eq!(report[3], 0.0, "the report of {bad} says finite");
        assert!(update.memory(&mut executor, &kept) == before, "{bad} changed a parameter or a moment");
        let zeroed = update.memory(&mut executor, &[LeafKind::Gradient]);
        assert!(zeroed.iter().flatten().all(|byte| *byte == 0), "{bad} stays in the gradients");
    }
    let mut executor = update.load(2);
    let before = update.memory(&mut executor, &kept);
    let report = update.step(&mut executor, f64::NAN, 1, &gradients(1));
    assert_eq!(report[3], 0.0, "a loss that is not a number is reported as finite");
    assert!(update.memory(&mut executor, &kept) == before, "the loss was not a number and a leaf changed");
    update.operations()
}

/// The value is replaced, and the gradient is added to the present one.
fn regularizer_of_coefficients() -> BTreeSet<&'static str> {
    const MODULES: usize = 5;
    const WEIGHT: f64 = 0.15;
    let mut graph = Graph::default();
    let coefficients =
        graph.add_leaf("coefficients", Type::f32(Shape::matrix(MODULES, 4)), LeafKind::Adapter);
    train_leaf(&mut graph, coefficients);
    let gradient = graph.gradient_of(coefficients).unwrap();
    let double = Type::new(Shape::vector(1), Storage::Plain(DType::F64));
    let value = graph.add_leaf(state::REG_LOSS, double, LeafKind::State);
    let three = Type::new(Shape::vector(3), Storage::Plain(DType::F64));
    let hyper = graph.add_leaf(input::HYPER, three, LeafKind::Input);
    let mut nodes = Vec::new();
    let (op, updates) = (Op::FourierReg { weight: WEIGHT }, vec![value, gradient]);
    graph.emit(&mut nodes, op, vec![coefficients, hyper], updates, &[], (Phase::Update, None));
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Update, nodes)];
    let point = random_reals(3, 4 * MODULES);
    let subject = Subject {
        name: "regularizer".into(),
        graph,
        extent: EXTENT,
        contents: vec![
            (coefficients, Content::Reals(point.clone())),
            (hyper, Content::Doubles(vec![1e-3, 1.0, 1.0])),
        ],
        scalar: Scalar::Loss { entry: Entry::Update, leaf: value },
    };
    subject.run_on_null(subject.plan(EXTENT, 2)).unwrap();
    let mut executor = subject.load(subject.plan(EXTENT, 2), 2);
    let want = WEIGHT
        * point.chunks(4).map(|a| f64::from(a[0]).powi(2) + (f64::from(a[1]) - 1.0).powi(2)).sum::<f64>()
        + WEIGHT * point.chunks(4).map(|a| f64::from(a[2]).powi(2) + f64::from(a[3]).powi(2)).sum::<f64>();
    assert!(want > 0.5, "a value of {want}");
    let mut added = vec![0.0; point.len()];
    for run in 1..=2 {
        executor.run(Entry::Update, &EXTENT).unwrap();
        let got = decode_doubles(&subject.read_bytes(&mut executor, value))[0];
        assert!((got - want).abs() < 1e-12, "run {run}: got {got}, want {want}");
        let twice = decode_reals(&subject.read_bytes(&mut executor, gradient));
        if run == 1 {
            added = twice;
        } else {
            assert_eq!(twice, added.iter().map(|once| 2.0 * once).collect::<Vec<_>>());
        }
    }
    // Its gradient has the scale of the loss; its value does not.
    executor.write(hyper, &[1e-3, 1.0, 8.0f64].map(f64::to_le_bytes).concat());
    subject.write_reals(&mut executor, gradient, &vec![0.0; added.len()]);
    executor.run(Entry::Update, &EXTENT).unwrap();
    let scaled = decode_reals(&subject.read_bytes(&mut executor, gradient));
    assert_eq!(scaled, added.iter().map(|once| 8.0 * once).collect::<Vec<_>>());
    assert_eq!(decode_doubles(&subject.read_bytes(&mut executor, value)), [want]);
    check_gradient("regularizer", &point, Storage::F32, &added, 1e-5, |moved| {
        subject.write_reals(&mut executor, coefficients, moved);
        subject.evaluate(&mut executor)
    });
    BTreeSet::from(["fourier_reg"])
}
