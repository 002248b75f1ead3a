//! AdamW with 8-bit moments against recorded steps: bitsandbytes' CUDA kernel bit for bit, its CPU path closely.
//!
//! `fixtures/optimizer8/README.md` describes the record. Steps run through the executor, on leaves that the compiler
//! creates.

use crate::numbers::{Content, assert_equal, bits, decode_doubles, decode_reals};
use crate::subject::{Scalar, Subject, plain_request};
use safetensors::SafeTensors;
use smidgen_compile::Request;
use smidgen_compile::leaves::train_leaf;
use smidgen_compile::names::{input, state};
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::update::append_update;
use smidgen_ir::quant::dynamic_map::{SIGNED_MAP, UNSIGNED_MAP};
use smidgen_ir::storage::dynamic8_codes;
use smidgen_ir::{AdamW, DType, Entry, Extent, Graph, LeafKind, Shape, Storage, Type, ValueId};
use smidgen_runtime::{Cpu, Executor};

const EXTENT: Extent = Extent { tokens: 1, rows: 1, segments: 1, audio: 0 };
const STEPS: u64 = 4;

fn read_fixture() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/optimizer8/optimizer8.safetensors");
    std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn bytes_of(file: &SafeTensors<'_>, name: &str) -> Vec<u8> {
    file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")).data().to_vec()
}

fn floats_of(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    decode_reals(&bytes_of(file, name))
}

/// Parameters and moments; a moment is the largest magnitudes of its blocks and its codes.
#[derive(Clone, Debug, PartialEq)]
struct State {
    parameters: Vec<f32>,
    moments: [(Vec<f32>, Vec<u8>); 2],
}

impl State {
    fn recorded(file: &SafeTensors<'_>, prefix: &str) -> State {
        let moments = ["m", "v"].map(|letter| {
            let name = format!("{prefix}.{letter}");
            (floats_of(file, &format!("{name}.absmax")), bytes_of(file, &name))
        });
        State { parameters: floats_of(file, &format!("{prefix}.parameters")), moments }
    }

    fn at_start(file: &SafeTensors<'_>, case: &str) -> State {
        let parameters = floats_of(file, &format!("{case}.start"));
        let nothing = (vec![0.0; dynamic8_codes(parameters.len()) / 4], vec![0; parameters.len()]);
        State { parameters, moments: [nothing.clone(), nothing] }
    }
}

/// One parameter, its update and the leaves around it.
struct Steps {
    subject: Subject,
    executor: Executor<Cpu>,
    learning_rate: f64,
    parameter: ValueId,
}

impl Steps {
    fn of(file: &SafeTensors<'_>, case: &str, threads: usize) -> Steps {
        let settings = decode_doubles(&bytes_of(file, &format!("{case}.settings")));
        let &[learning_rate, beta1, beta2, eps, weight_decay] = &settings[..] else { panic!("{settings:?}") };
        let start = State::at_start(file, case);
        let mut graph = Graph::default();
        let ty = Type::f32(Shape::vector(start.parameters.len()));
        let parameter = graph.add_leaf("parameter", ty, LeafKind::Adapter);
        train_leaf(&mut graph, parameter);
        let mut doubles = |name: &str, n: usize, kind: LeafKind| {
            graph.add_leaf(name, Type::new(Shape::vector(n), Storage::Plain(DType::F64)), kind)
        };
        let loss = doubles(state::LOSS, 1, LeafKind::State);
        doubles(state::REPORT, 4, LeafKind::State);
        doubles(input::HYPER, 3, LeafKind::Input);
        graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Update, vec![])];
        let adamw = AdamW { beta1, beta2, eps, weight_decay };
        let optimizer = Optimizer { adamw, moments: Moments::Bits8, master: Master::F32, clip: 0.0 };
        append_update(&mut graph, &Request { optimizer, ..plain_request() });
        let contents = vec![(parameter, Content::Reals(start.parameters.clone()))];
        let scalar = Scalar::Loss { entry: Entry::Update, leaf: loss };
        let subject = Subject { name: case.into(), graph, extent: EXTENT, contents, scalar };
        let executor = subject.load(subject.plan(EXTENT, threads), threads);
        Steps { subject, executor, learning_rate, parameter }
    }

    fn leaf(&self, name: &str) -> ValueId {
        let found = self.subject.graph.values.iter().position(|value| value.name == name);
        ValueId(found.unwrap_or_else(|| panic!("no leaf `{name}`")) as u32)
    }

    fn write(&mut self, state: &State) {
        self.subject.write_reals(&mut self.executor, self.parameter, &state.parameters);
        for (letter, (largest, codes)) in ["m", "v"].iter().zip(&state.moments) {
            let mut bytes: Vec<u8> = largest.iter().flat_map(|value| value.to_le_bytes()).collect();
            bytes.extend(codes);
            let leaf = self.leaf(&format!("{letter} parameter"));
            self.executor.write(leaf, &bytes);
        }
    }

    fn read(&mut self) -> State {
        let parameters = decode_reals(&self.subject.read_bytes(&mut self.executor, self.parameter));
        let moments = ["m", "v"].map(|letter| {
            let leaf = self.leaf(&format!("{letter} parameter"));
            let bytes = self.subject.read_bytes(&mut self.executor, leaf);
            let (largest, codes) = bytes.split_at(dynamic8_codes(parameters.len()));
            (decode_reals(largest), codes.to_vec())
        });
        State { parameters, moments }
    }

    fn step(&mut self, file: &SafeTensors<'_>, step: u64) {
        let halves = bytes_of(file, &format!("{}.{step}.gradient", self.subject.name));
        let gradient: Vec<f32> = halves
            .chunks_exact(2)
            .map(|two| f32::from_bits(u32::from(u16::from_le_bytes([two[0], two[1]])) << 16))
            .collect();
        let gradient_leaf = self.subject.graph.gradient_of(self.parameter).unwrap();
        self.subject.write_reals(&mut self.executor, gradient_leaf, &gradient);
        let hyper = [self.learning_rate, step as f64, 1.0].map(f64::to_le_bytes).concat();
        let leaf = self.leaf(input::HYPER);
        self.executor.write(leaf, &hyper);
        self.executor.run(Entry::Update, &EXTENT).unwrap();
    }
}

#[test]
fn the_dynamic_maps_match_bitsandbytes() {
    let file = read_fixture();
    let file = SafeTensors::deserialize(&file).unwrap();
    assert_equal("signed", &bits(&SIGNED_MAP), &bits(&floats_of(&file, "map.signed")));
    assert_equal("unsigned", &bits(&UNSIGNED_MAP), &bits(&floats_of(&file, "map.unsigned")));
}

/// Parameters, codes and scales of every step, on one thread and on several.
#[test]
fn steps_in_8_bits_match_the_kernel_of_bitsandbytes() {
    let file = read_fixture();
    let file = SafeTensors::deserialize(&file).unwrap();
    for case in ["plain", "short", "extremes"] {
        for threads in [1, 3] {
            let mut steps = Steps::of(&file, case, threads);
            steps.write(&State::at_start(&file, case));
            for step in 1..=STEPS {
                steps.step(&file, step);
                let want = State::recorded(&file, &format!("{case}.{step}.kernel"));
                let got = steps.read();
                let name = |what: &str| format!("{case} step {step} {what}");
                for (letter, got, want) in
                    [("m", &got.moments[0], &want.moments[0]), ("v", &got.moments[1], &want.moments[1])]
                {
                    assert_equal(&name(&format!("{letter} absmax")), &bits(&got.0), &bits(&want.0));
                    assert_equal(&name(letter), &got.1, &want.1);
                }
                assert_equal(&name("parameters"), &bits(&got.parameters), &bits(&want.parameters));
            }
        }
    }
}

/// One step from each recorded state. The library looks codes up on a grid with a spacing of 2/65535, so a code may be
/// the neighbour of the nearest, or decode to a number less than one grid step away.
#[test]
fn a_step_in_8_bits_is_close_to_that_of_the_library() {
    let file = read_fixture();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut steps = Steps::of(&file, "short", 2);
    let mut before = State::at_start(&file, "short");
    const GRID: f32 = 2.0 / 65535.0;
    let (mut codes, mut equal) = (0, 0);
    for step in 1..=STEPS {
        steps.write(&before);
        steps.step(&file, step);
        let (got, want) = (steps.read(), State::recorded(&file, &format!("short.{step}.library")));
        for (index, (got, want)) in got.parameters.iter().zip(&want.parameters).enumerate() {
            let error = (got - want).abs();
            assert!(error <= 2.4e-7 * want.abs().max(1.0), "step {step} [{index}]: got {got}, want {want}");
        }
        let maps = [&SIGNED_MAP, &UNSIGNED_MAP];
        for (moment, (got, want)) in got.moments.iter().zip(&want.moments).enumerate() {
            let value = |code: &u8| maps[moment][usize::from(*code)];
            for (block, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                let error = (got / want - 1.0).abs();
                assert!(error < 1e-6, "step {step} moment {moment} block {block}: got {got}, want {want}");
            }
            for (index, (got, want)) in got.1.iter().zip(&want.1).enumerate() {
                assert!(
                    got.abs_diff(*want) <= 1 || (value(got) - value(want)).abs() < GRID,
                    "step {step} moment {moment} [{index}]: got {got}, want {want}"
                );
                codes += usize::from(value(want) > 0.01);
                equal += usize::from(value(want) > 0.01 && got == want);
            }
        }
        before = want;
    }
    assert!(codes > 10_000 && equal * 1000 >= codes * 985, "{equal} of {codes} codes are the library's");
}
