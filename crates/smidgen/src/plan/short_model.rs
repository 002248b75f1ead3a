//! Estimates a plan of a deep model from the solver's plans of two of its beginnings, in a few hundredths of the time.
//!
//! Layers repeat, so memory and time grow by the same amount with each further group of layers. A beginning gets the share
//! of the budget that its layers would have: what no layer needs is taken off first, and found from the leanest plans of
//! both beginnings. Plans of the whole model differ from such an estimate by a few percent.
//! A model whose layers do not repeat, or that is not much deeper than the beginnings, is planned as a whole.

use crate::failure::Failure;
use crate::plan::conditions::Conditions;
use crate::plan::context::pinned_bytes;
use smidgen_compile::model::spec::{EMBEDDING, UNTIED_HEAD};
use smidgen_compile::{Budget, Demand, Look, Request};
use smidgen_ir::Extent;

/// A model by its beginnings.
pub struct ShortModel<'a> {
    conditions: &'a Conditions,
    layers: usize,
    /// The shorter beginning first; one if the whole model is planned.
    beginnings: Vec<Request>,
    /// Bytes of embedding and head, which every beginning has.
    tables_bytes: u64,
}

/// What a plan needs and reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub peak_bytes: f64,
    pub pinned_bytes: f64,
    pub step_ms: f64,
}

impl<'a> ShortModel<'a> {
    pub fn of(request: &Request, conditions: &'a Conditions) -> ShortModel<'a> {
        let layers = request.spec.layers.len();
        let repeats = |period: &usize| {
            let all = &request.spec.layers;
            (0..layers - period).all(|layer| all[layer] == all[layer + period])
        };
        let period = (1..=layers / 6).find(repeats);
        let counts = period.map_or(vec![layers], |period| {
            let shorter = period.max(2);
            vec![shorter, 2 * shorter]
        });
        let table = |name: &str| {
            let tensor = request.spec.tensors().into_iter().find(|tensor| tensor.name == name);
            let bytes = tensor.map(|tensor| {
                let (rows, columns) = tensor.shape.at(&Extent::default());
                request.storage_of(name).bytes(rows, columns)
            });
            bytes.unwrap_or(0) as u64
        };
        ShortModel {
            conditions,
            layers,
            beginnings: counts.into_iter().map(|count| beginning(request, count)).collect(),
            tables_bytes: table(EMBEDDING) + table(UNTIED_HEAD),
        }
    }

    /// Whether a micro-batch fits.
    pub fn fits(&self, demand: &Demand, look: Look) -> bool {
        let Some(conditions) = self.scaled(demand).pop() else { return false };
        conditions.fitting(self.longest()).fits(demand, look)
    }

    /// The estimate for the fastest plan that fits; `None` if none does.
    pub fn solve(&self, demands: &[Demand]) -> Result<Option<Estimate>, Failure> {
        let Some(smallest) = demands.last() else { return Ok(None) };
        let mut found = Vec::new();
        for (request, conditions) in self.beginnings.iter().zip(self.scaled(smallest)) {
            let Ok(solution) = conditions.solve(request, demands) else { return Ok(None) };
            found.push((
                request.spec.layers.len() as f64,
                Estimate {
                    peak_bytes: solution.peak_bytes as f64,
                    pinned_bytes: pinned_bytes(&solution.plan) as f64,
                    step_ms: solution.step_ms,
                },
            ));
        }
        Ok(match &found[..] {
            [(_, whole)] => Some(*whole),
            [(few, shorter), (more, longer)] => {
                let line = |of: fn(&Estimate) -> f64| {
                    let slope = ((of(longer) - of(shorter)) / (more - few)).max(0.0);
                    of(longer) + slope * (self.layers as f64 - more)
                };
                let device_bytes = self.conditions.budget.device_bytes as f64;
                Some(Estimate {
                    peak_bytes: line(|estimate| estimate.peak_bytes).min(device_bytes),
                    pinned_bytes: line(|estimate| estimate.pinned_bytes),
                    step_ms: line(|estimate| estimate.step_ms),
                })
            }
            _ => None,
        })
    }

    fn longest(&self) -> &Request {
        self.beginnings.last().expect("there is a beginning")
    }

    /// The conditions of each beginning: its share of the budgets. Empty if what no layer needs is above the budget.
    fn scaled(&self, demand: &Demand) -> Vec<Conditions> {
        let [shorter, longer] = &self.beginnings[..] else { return vec![self.conditions.clone()] };
        let lean = |request: &Request| {
            let unlimited = Conditions { budget: Budget::device(u64::MAX), ..self.conditions.clone() };
            unlimited.fitting(request).usual_peak_bytes(demand).unwrap_or(u64::MAX) as f64
        };
        let (few, more) = (shorter.spec.layers.len() as f64, longer.spec.layers.len() as f64);
        let (least, most) = (lean(shorter), lean(longer));
        let fixed_bytes = least - few * (most - least) / (more - few);
        let budget = self.conditions.budget;
        let share = |total: u64, fixed: f64, request: &Request| {
            let part = request.spec.layers.len() as f64 / self.layers as f64;
            fixed + (total as f64 - fixed) * part
        };
        if fixed_bytes > budget.device_bytes as f64 {
            return vec![];
        }
        let of = |request: &Request| {
            let offload_bytes = match budget.offload_bytes {
                u64::MAX => u64::MAX,
                total => share(total, self.tables_bytes.min(total) as f64, request) as u64,
            };
            let device_bytes = share(budget.device_bytes, fixed_bytes, request) as u64;
            Conditions { budget: Budget { device_bytes, offload_bytes, ..budget }, ..self.conditions.clone() }
        };
        vec![of(shorter), of(longer)]
    }
}

/// The request for the first layers of a model.
fn beginning(request: &Request, layers: usize) -> Request {
    let is_kept = |path: &str| {
        let number =
            path.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        number.is_none_or(|number| number < layers)
    };
    let mut short = request.clone();
    short.spec.layers.truncate(layers);
    short.adapters.retain(|module| is_kept(&module.path));
    short.trained.retain(|name| is_kept(name));
    short.storage.retain(|name, _| is_kept(name));
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::demand::DemandShape;
    use crate::plan::facts::MemoryFacts;
    use crate::plan::job::{Job, Profiles};
    use crate::plan::shapes::Shape;
    use smidgen_recipe::{Batch, ModelPath, Recipe};
    use std::path::Path;

    /// The whole model is planned for comparison: one that fits as it is, and one whose weights are offloaded.
    #[test]
    fn an_estimate_is_near_the_plan_of_the_whole_model() {
        for (card, base) in [("rtx-4090", "as-stored"), ("rtx-4060", "nf4")] {
            let shape = Shape::find("llama3.2-3b").unwrap();
            let mut recipe = Recipe::new(ModelPath::folder(Path::new(shape.name)));
            (recipe.train.batch, recipe.data.max_tokens) = (Batch::Samples(2), 1024);
            for (key, value) in [("memory.profile", card), ("model.base", base)] {
                recipe.set(key, value, Path::new("/")).unwrap();
            }
            let job = Job::prepare_model(recipe, shape.model(), Profiles::BuiltIn).unwrap();
            let conditions = Conditions::of(&job, &MemoryFacts::of(&job)).unwrap();
            let demands = DemandShape::of(&job, None).unwrap().demands;
            let estimate = ShortModel::of(&job.request, &conditions).solve(&demands).unwrap().unwrap();
            let whole = conditions.solve(&job.request, &demands).unwrap();
            let near = |one: f64, other: f64, share: f64| (one / other - 1.0).abs() < share;
            assert!(near(estimate.step_ms, whole.step_ms, 0.1), "{card}: {estimate:?} {}", whole.step_ms);
            assert!(
                near(estimate.peak_bytes, whole.peak_bytes as f64, 0.1),
                "{card}: {estimate:?} {}",
                whole.peak_bytes
            );
        }
    }
}
