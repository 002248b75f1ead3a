//! Plans the memory of a generation before anything is loaded: the arena, the process and the budget.
//!
//! If the user sets no context, the longest one that the model and the budget allow is chosen, up to a limit. A context
//! that does not fit is refused, and the hint names one that does.
//! Left out: KV caches in fewer bits.

use crate::failure::Failure;
use crate::plan::budget::JobBudget;
use crate::plan::conditions::Conditions;
use crate::plan::context::{generation_bytes, gpu_context, job_context};
use crate::plan::devices::JobDevice;
use smidgen_compile::model::audio::AudioInput;
use smidgen_compile::{DecodeShape, Demand, Look, Purpose, Request, Solution, SolveError, largest};
use smidgen_formats::model::Model;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Category, Choice, DeviceKind, LeafKind, Pins, Plan};

/// The requested sizes of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Sequences that are generated at the same time.
    pub slots: usize,
    /// Tokens per sequence, prompt and answer together. `None` is as many as fit, up to `MOST_AUTO_CONTEXT`.
    pub context: Option<usize>,
    /// Tokens of all sequences together; `None` is `slots` times the context.
    pub cache_tokens: Option<usize>,
    /// Tokens of prompts that are read at the same time.
    pub new_tokens: usize,
    /// Whether prompts have audio.
    pub has_audio: bool,
    pub budget: JobBudget,
}

/// The longest context that is chosen automatically; the model's own may be a hundred times longer.
const MOST_AUTO_CONTEXT: usize = 4096;
/// The default of [`Sizes::new_tokens`].
pub const DEFAULT_NEW_TOKENS: usize = 256;
/// The shortest context that is suggested.
pub const SHORTEST: usize = 16;

/// A generation that fits.
#[derive(Debug)]
pub struct GenerationPlan {
    pub plan: Plan,
    pub shape: DecodeShape,
    /// Name of the device, for messages.
    pub device: String,
    /// Memory of the process or the driver outside the arena, `margin_bytes` included.
    pub context_bytes: u64,
    pub margin_bytes: u64,
    pub peak_bytes: u64,
    pub budget_bytes: u64,
    /// The budget was stated; otherwise it follows from free memory.
    pub stated: bool,
}

/// Plans the generation, or refuses with what would fit. `request` is for the same device as `place`; its `decode` is
/// ignored.
pub fn plan_generation(
    request: &Request,
    model: &Model,
    place: &JobDevice,
    sizes: &Sizes,
) -> Result<GenerationPlan, Failure> {
    let longest = request.spec.max_positions;
    if let Some(context) = sizes.context.filter(|context| *context > longest) {
        return Err(Failure::recipe(format!(
            "a context of {context} tokens is more than the model's maximum of {longest}"
        )));
    }
    let candidate = |context: usize, pins: &Pins| Candidate::new(request, model, place, sizes, context, pins);
    let wanted = sizes.context.unwrap_or(longest.min(MOST_AUTO_CONTEXT));
    let (open, resident) = (Pins::default(), Pins::default().without(Choice::Weights));
    // Offloaded weights are fetched for every token, so an automatic context is shortened first.
    for pins in if sizes.context.is_none() { vec![&resident, &open] } else { vec![&open] } {
        let first = candidate(wanted, pins);
        if let Ok(solution) = first.solve() {
            return Ok(first.plan(solution, sizes.budget));
        }
        if sizes.context.is_none()
            && let Some(context) =
                longest_that_fits(wanted, |context, look| candidate(context, pins).fits(look))
        {
            let shorter = candidate(context, pins);
            if let Ok(solution) = shorter.solve() {
                return Ok(shorter.plan(solution, sizes.budget));
            }
        }
    }
    let planned = |context: usize| {
        let candidate = candidate(context, &open);
        let solution = candidate.solve().unwrap_or_else(|error| *error.leanest);
        candidate.plan(solution, sizes.budget)
    };
    let fitting =
        longest_that_fits(wanted, |context, look| candidate(context, &open).fits(look)).map(planned);
    Err(refusal(&planned(wanted), sizes, fitting, &planned(SHORTEST.min(wanted))))
}

/// A generation with one length of context.
struct Candidate {
    request: Request,
    shape: DecodeShape,
    conditions: Conditions,
    /// Name of the device, for messages.
    device: String,
}

impl Candidate {
    fn new(
        request: &Request,
        model: &Model,
        place: &JobDevice,
        sizes: &Sizes,
        context: usize,
        pins: &Pins,
    ) -> Candidate {
        let shape = DecodeShape {
            slots: sizes.slots,
            positions: context,
            cache_rows: sizes.cache_tokens.unwrap_or(sizes.slots * context),
            new_tokens: sizes.new_tokens.min(sizes.slots * context).max(sizes.slots),
        };
        let audio = if sizes.has_audio { AudioInput::Embeddings } else { AudioInput::None };
        let mut request = Request { decode: Some(shape), audio, ..request.clone() };
        request.extent = request.decode_extent().unwrap_or_default();
        let context = match request.device {
            DeviceKind::Cpu => job_context(&request, model, generation_bytes(&request, &shape)),
            DeviceKind::Cuda => gpu_context(place),
        };
        let conditions =
            Conditions::for_inference(Purpose::Generation, &request, place, context, sizes.budget.bytes);
        let conditions = Conditions { pins: pins.clone(), ..conditions };
        Candidate { request, shape, conditions, device: place.describe() }
    }

    /// One pass over as many tokens as are read at the same time.
    fn demand(&self) -> Demand {
        let extent = self.request.extent;
        Demand { micro_tokens: extent.tokens, extent, step: extent, micro_steps: 1.0 }
    }

    fn solve(&self) -> Result<Solution, SolveError> {
        self.conditions.solve(&self.request, &[self.demand()])
    }

    fn fits(&self, look: Look) -> bool {
        self.conditions.fitting(&self.request).fits(&self.demand(), look)
    }

    fn plan(self, solution: Solution, budget: JobBudget) -> GenerationPlan {
        let Solution { plan, peak_bytes, context_bytes, .. } = solution;
        let JobBudget { bytes: budget_bytes, stated, .. } = budget;
        let margin_bytes = self.conditions.context.overhead.margin_bytes;
        let Candidate { shape, device, .. } = self;
        GenerationPlan { plan, shape, device, context_bytes, margin_bytes, peak_bytes, budget_bytes, stated }
    }
}

/// The largest multiple of 8 below `wanted` that fits, at least `SHORTEST`.
fn longest_that_fits(wanted: usize, fits: impl Fn(usize, Look) -> bool) -> Option<usize> {
    let longest = wanted.saturating_sub(1) / 8;
    largest(longest, |eighth, look| fits(8 * eighth, look))
        .map(|most| 8 * most)
        .filter(|most| *most >= SHORTEST)
}

fn refusal(
    first: &GenerationPlan,
    sizes: &Sizes,
    fitting: Option<GenerationPlan>,
    least: &GenerationPlan,
) -> Failure {
    let context = first.shape.positions;
    let budget = if first.stated { "the budget is" } else { "free memory is" };
    let failure = Failure::memory(format!(
        "a context of {context} tokens needs {}, {budget} {}\n  base weights {}, keys and values {}",
        format_bytes(first.peak_bytes),
        format_bytes(first.budget_bytes),
        format_bytes(first.bytes_of(Category::BaseWeights)),
        format_bytes(cache_bytes(&first.plan) as u64),
    ));
    match fitting {
        Some(plan) => {
            let (context, bytes) = (plan.shape.positions, format_bytes(plan.peak_bytes));
            let failure = failure.hint(format!("`--context {context}` would need {bytes}"));
            match sizes.slots {
                1 => failure,
                slots => failure.hint(format!("fewer than {slots} sequences at the same time need less")),
            }
        }
        None => failure.hint(format!(
            "no context fits: {} tokens would need {}",
            least.shape.positions,
            format_bytes(least.peak_bytes)
        )),
    }
}

/// Bytes of the cached keys and values.
pub fn cache_bytes(plan: &Plan) -> usize {
    let buffers = plan.leaves(LeafKind::Cache).filter_map(|(_, value)| value.buffer);
    buffers.map(|id| plan.buffer(id).bytes).sum()
}

impl GenerationPlan {
    pub fn bytes_of(&self, wanted: Category) -> u64 {
        let rows = self.plan.peak().rows;
        rows.iter().filter(|(category, _)| *category == wanted).map(|(_, bytes)| *bytes as u64).sum()
    }

    /// Names and bytes that add up to the peak.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        let cache = cache_bytes(&self.plan) as u64;
        vec![
            ("base weights", self.bytes_of(Category::BaseWeights)),
            ("adapters", self.bytes_of(Category::Adapters)),
            ("keys and values", cache),
            ("activations", self.bytes_of(Category::Activations) - cache),
            ("workspace", self.bytes_of(Category::Workspace)),
            ("context", self.context_bytes),
        ]
    }
}
