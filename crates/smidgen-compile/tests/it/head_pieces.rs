//! The head in pieces: the leanest plans have it, and the solver chooses it only if it is needed or faster.
//!
//! Only plans are tested here. The runtime's tests compare its results with those of the whole head.

use crate::shapes;
use smidgen_compile::adapter::{Layers, LoraModule, Targets};
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::passes::head_pieces;
use smidgen_compile::{
    Budget, Choice, Context, Demand, Profile, Purpose, Question, Request, Solution, SolveError, Why, compile,
    solve,
};
use smidgen_ir::{
    Code4, DType, DeviceKind, Entry, Extent, Op, Pins, Plan, Policy, Precision, Space, Storage,
};

const CONTEXT: Context = shapes::process(1_000_000, 100, 3000);

/// Two small layers and a head of 64 MiB.
fn request(tied: bool, device: DeviceKind) -> Request {
    let spec = shapes::llama(512, 1024, 2, (4, 2), 65_536, tied);
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 192, 2);
    let precision = if device == DeviceKind::Cuda { Precision::Bf16 } else { Precision::F32 };
    Request { device, precision, ..request }
}

fn solved(request: &Request, budget: u64) -> Result<Solution, SolveError> {
    let demand = Demand { micro_tokens: 192, extent: request.extent, step: request.extent, micro_steps: 1.0 };
    let profile = Profile::cpu(2, request.precision);
    solve(&Question {
        purpose: Purpose::Training,
        request,
        demands: &[demand],
        pins: &Pins::default(),
        context: CONTEXT,
        budget: Budget::device(budget),
        profile: &profile,
    })
}

fn peak_of(plan: &Plan) -> u64 {
    CONTEXT.bytes_for(plan) + plan.reserved_bytes() as u64
}

fn count(plan: &Plan, entry: Entry, is_it: fn(&Op) -> bool) -> usize {
    plan.entry(entry).steps.iter().filter(|step| is_it(&step.op)).count()
}

fn in_pieces(head_pieces: usize, loss_chunk: usize) -> Policy {
    Policy { weights: Space::Host, tables_offloaded: true, head_pieces, loss_chunk, ..Policy::default() }
}

/// The reason why the head is in pieces, or is not.
fn why(solution: &Solution) -> Option<Why> {
    let mut reasons = solution.reasons.iter();
    reasons.find(|reason| reason.choice == Choice::HeadPieces).map(|reason| reason.why)
}

/// The plan and step time of the same policy with a head that is fetched whole.
fn whole(request: &Request, policy: &Policy) -> (Plan, f64) {
    let plan = compile(request, &Policy { head_pieces: 0, ..policy.clone() });
    let profile = Profile::cpu(2, request.precision);
    let seconds = [Entry::MicroStep, Entry::Update].map(|entry| profile.entry_seconds(&plan, entry));
    (plan, 1e3 * seconds.iter().sum::<f64>())
}

#[test]
fn a_head_in_pieces_is_the_leanest_and_taken_where_it_is_needed_or_faster() {
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        for tied in [false, true] {
            let request = request(tied, device);
            let roomy = solved(&request, u64::MAX).unwrap();
            assert!(!roomy.policy.offloads());
            let leanest = solved(&request, 1).unwrap_err().leanest;
            assert_eq!((leanest.policy.tables_offloaded, leanest.policy.head_pieces), (true, 4));
            let (with_whole, _) = whole(&request, &leanest.policy);
            let saved = peak_of(&with_whole) - leanest.peak_bytes;
            assert!(saved > 40 << 20, "{device:?}: {saved} bytes of 64 MiB");
            assert_eq!(why(&leanest), Some(Why::NeedsLeast { peak_bytes: leanest.peak_bytes }));
            let mut needed = 0;
            for part in 0..=8 {
                let budget = leanest.peak_bytes + (roomy.peak_bytes - leanest.peak_bytes) * part / 8;
                let solution = solved(&request, budget).unwrap();
                assert!(solution.peak_bytes <= budget);
                let pieces = solution.policy.head_pieces;
                let sums = |entry| count(&solution.plan, entry, |op| matches!(op, Op::HeadSums(_)));
                assert_eq!([sums(Entry::MicroStep), sums(Entry::Eval)], [pieces; 2]);
                let priced = solution.prices.iter().any(|price| price.choice == Choice::HeadPieces);
                assert_eq!(priced, pieces > 0);
                if pieces > 0 {
                    let (plan, step_ms) = whole(&request, &solution.policy);
                    let is_needed = peak_of(&plan) > budget;
                    assert!(is_needed || step_ms >= solution.step_ms, "{device:?} at {budget}");
                    needed += usize::from(is_needed);
                }
            }
            assert!(needed > 0);
        }
    }
}

/// The head is fetched whole if it has an adapter, if its rows are not contiguous, or if pieces would be small.
#[test]
fn a_head_that_cannot_be_cut_is_fetched_whole() {
    let plain = request(false, DeviceKind::Cpu);
    assert_eq!(head_pieces::count(&plain), 4);
    let mut adapted = plain.clone();
    adapted.adapters.push(LoraModule { path: HEAD.into(), rank: 4, scale: 1.0 });
    assert_eq!(head_pieces::count(&adapted), 0);
    let leanest = solved(&adapted, 1).unwrap_err().leanest;
    assert!(leanest.policy.tables_offloaded && leanest.policy.head_pieces == 0);
    assert_eq!(why(&leanest), Some(Why::HeadHasAdapter));
    let mut coded = plain.clone();
    coded.storage.insert("lm_head.weight".into(), Storage::Bnb4 { code: Code4::Nf4, double: true });
    assert_eq!(head_pieces::count(&coded), 0);
    let mut wider = plain.clone();
    wider.storage.insert("lm_head.weight".into(), Storage::Plain(DType::F32));
    assert_eq!(head_pieces::count(&wider), 8);
    let small = shapes::request(shapes::tiny(), Targets::AllLinear, Layers::All, 8, 1);
    assert_eq!(head_pieces::count(&small), 0);
    // A saved policy may have pieces for a head that has an adapter now; the head is then not cut.
    let policy = in_pieces(4, 64);
    assert_eq!(count(&compile(&adapted, &policy), Entry::MicroStep, |op| matches!(op, Op::HeadSums(_))), 0);
}

/// Pieces cover every token id once and start at aligned rows of logits.
#[test]
fn pieces_cover_the_vocabulary_once() {
    for (vocabulary, pieces) in [(65_536, 4), (65_537, 5), (1000, 3), (64, 64), (63, 8)] {
        let spec = shapes::llama(32, 48, 2, (4, 2), vocabulary, false);
        let request = shapes::request(spec, Targets::AllLinear, Layers::All, 8, 1);
        let plan = compile(&request, &in_pieces(pieces, 8));
        let mut words = 0;
        for step in &plan.entry(Entry::MicroStep).steps {
            let Op::HeadSums(piece) = step.op else { continue };
            assert_eq!(piece.first_word, words);
            assert!(piece.first_word.is_multiple_of(64) || vocabulary <= 64 * pieces);
            words += plan.value(step.inputs[1]).ty.shape.at(&Extent::default()).0;
        }
        assert_eq!(words, vocabulary);
    }
}
