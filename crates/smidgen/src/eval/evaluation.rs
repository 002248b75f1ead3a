//! Evaluates a model, and the same model with an adapter, with the task of a recipe.
//!
//! The two run one after the other with plans of the same sizes, so that only the adapter differs. Both are planned
//! before either is loaded: an evaluation that does not fit is refused before a weight is read.
//! Left out: which model and adapter a command names, and where results are written.

use super::answers::{AnswerKey, NEW_TOKENS, generate_answers};
use super::evaluator::{EvalPlan, EvalResources, Evaluator, Subject, plan_evaluation};
use super::results::{Measured, Results, questions_of_choices, questions_of_key, questions_of_loss};
use super::transcription::Transcripts;
use crate::console::colour::WARNING;
use crate::console::progress::CountedProgress;
use crate::failure::Failure;
use crate::generate::session::{Opening, TokenSession};
use crate::generate::stop::stop_ids;
use crate::machine::process_memory::read_rss;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::audio::audio_rows;
use crate::plan::budget::JobBudget;
use crate::plan::devices::JobDevice;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, GenerationPlan, Sizes, plan_generation};
use crate::plan::job::check_range;
use crate::plan::model::build_storage;
use crate::rows::choice::ChoiceSet;
use crate::rows::keys::{data_files, training_sources};
use crate::rows::sets::{EvalSets, read_eval_questions, read_eval_sets};
use crate::session::adapted::build_adapted_request;
use crate::session::encoding::encode_clips;
use crate::session::likelihood::{check_finite, evaluated_samples};
use serde_json::{Map, Value as Json, json};
use smidgen_compile::Request;
use smidgen_compile::model::audio::AudioInput;
use smidgen_data::prepare::read_tokenizer;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_hub::Access;
use smidgen_recipe::{EvalTask, Recipe};
use smidgen_runtime::{AnyDevice, Device};

/// The inputs of an evaluation.
pub struct Evaluation<'a> {
    pub recipe: &'a Recipe,
    pub model: &'a Model,
    pub adapter: Option<&'a AdapterFile>,
    pub place: &'a JobDevice,
    pub arithmetic: Arithmetic,
    pub threads: usize,
    pub budget: JobBudget,
    /// For generated answers; 1 is greedy.
    pub beams: usize,
    pub access: &'a Access,
    pub quiet: bool,
    pub say: &'a dyn Fn(&str),
    /// Receives the larger of the two plans before anything is loaded.
    pub on_plan: &'a dyn Fn(LargestPlan<'_>),
}

/// The larger of the plans of the two models.
pub enum LargestPlan<'a> {
    Likelihood(&'a EvalPlan, EvalResources<'a>),
    Generation(&'a GenerationPlan),
}

/// The prompts and answers of an evaluation that generates.
#[derive(Clone, Copy)]
struct Prompts {
    rows: usize,
    longest_prompt: usize,
    /// Maximum tokens of an answer.
    new_tokens: usize,
    has_audio: bool,
}

/// Sequences that are generated at the same time, if they fit.
const MOST_SLOTS: usize = 8;

/// The scores of one model, the memory that was planned for it, and the device for the next one.
type Found = (Measured, u64, AnyDevice);

impl Evaluation<'_> {
    /// Runs the recipe's task on a device that was opened with the threads and the arithmetic of the evaluation.
    pub fn run(&self, device: AnyDevice) -> Result<Results, Failure> {
        let mut results = match self.recipe.eval.task {
            EvalTask::Loss | EvalTask::Choice => self.by_likelihood(device)?,
            EvalTask::Generate => self.by_generation(device)?,
            EvalTask::Wer => self.by_transcription(device)?,
        };
        results.about.extend(self.about()?);
        Ok(results)
    }

    fn by_likelihood(&self, mut device: AnyDevice) -> Result<Results, Failure> {
        let (model, limit) = (self.model, self.recipe.eval.limit);
        let mut subjects = self.subjects()?;
        let sets = read_eval_sets(self.recipe, None, model, &subjects[0].request, self.access)?;
        let EvalSets { loss, choices } = &sets;
        self.warn(loss.iter().flat_map(|loss| &loss.warnings));
        self.warn(choices.iter().flat_map(|choices| &choices.warnings));
        if let Some(clips) = loss.as_ref().and_then(|loss| loss.set.clips()) {
            // Both subjects start from the same rows, so that only the adapter differs.
            let audio = audio_rows(subjects.iter().map(|subject| &subject.request));
            subjects.iter_mut().for_each(|subject| subject.request.audio = audio);
            let store = clips.store();
            let (encoded, freed) =
                encode_clips(store, &subjects[0].request, (model, None), device, self.say)?;
            store.set_encoded(encoded);
            device = freed;
        }
        let token_sets: Vec<_> = (loss.iter().map(|loss| (&loss.set, limit)))
            .chain(choices.iter().map(|choices| (&choices.set, 0)))
            .collect();
        let JobBudget { bytes: budget_bytes, stated, .. } = self.budget;
        let data_bytes = loss.as_ref().map_or(0, |loss| loss.set.heap_bytes())
            + choices.as_ref().map_or(0, ChoiceSet::heap_bytes);
        let means = EvalResources { place: self.place, budget_bytes, stated, data_bytes };
        let plans = plan_evaluation(&subjects, model, &token_sets, means)?;
        if let Some(largest) = plans.iter().max_by_key(|plan| plan.peak_bytes) {
            (self.on_plan)(LargestPlan::Likelihood(largest, means));
        }
        let mut plans = subjects.iter().zip(plans);
        let mut results = self.measure_each(device, |name, _, device| {
            let (subject, plan) = plans.next().expect("there is a plan for each model");
            let planned_bytes = plan.peak_bytes;
            let mut evaluator = Evaluator::load(subject, model, plan, device)?;
            let measured = self.measure_likelihoods(&mut evaluator, &sets, name)?;
            Ok((measured, planned_bytes, evaluator.into_device()))
        })?;
        results.questions = match (choices, loss) {
            (Some(choices), _) => questions_of_choices(choices),
            (None, Some(loss)) => questions_of_loss(&loss.set, results.base.records.len()),
            (None, None) => unreachable!("a set to evaluate was read"),
        };
        Ok(results)
    }

    fn measure_likelihoods(
        &self,
        evaluator: &mut Evaluator,
        sets: &EvalSets,
        name: &str,
    ) -> Result<Measured, Failure> {
        let (what, mut measured) = (format!("the evaluation of the {name}"), Measured::default());
        if let Some(loss) = &sets.loss {
            let limit = self.recipe.eval.limit;
            let progress = self.progress(name, evaluated_samples(&loss.set, limit));
            let found = evaluator.log_likelihoods(&loss.set, limit, &|done| progress.done(done))?;
            check_finite(&loss.set, &found, &what)?;
            let tokens = (0..found.len()).map(|sample| u64::from(loss.set.supervised(sample))).sum();
            measured.add_loss(-found.iter().sum::<f64>(), tokens);
            if sets.choices.is_none() {
                measured.add_loss_records(&found);
            }
        }
        if let Some(choices) = &sets.choices {
            let progress = self.progress(name, choices.set.len());
            let found = evaluator.log_likelihoods(&choices.set, 0, &|done| progress.done(done))?;
            check_finite(&choices.set, &found, &what)?;
            let scores = choices.score(&found);
            if sets.loss.is_none() {
                measured.add_loss(scores.gold_nll, scores.gold_tokens);
            }
            measured.add_choices(choices, &scores, &found);
        }
        Ok(measured)
    }

    fn by_generation(&self, device: AnyDevice) -> Result<Results, Failure> {
        let tokenizer = read_tokenizer(self.model).map_err(Failure::model)?;
        let request = self.request(None)?;
        let questions = read_eval_questions(self.recipe, &tokenizer, self.model, &request, self.access)?;
        let key = AnswerKey::build(&questions, &self.recipe.eval.answer, &tokenizer)?;
        self.warn(&questions.warnings);
        drop(questions);
        let sizes = self.generation_sizes(Prompts {
            rows: key.rows.len(),
            longest_prompt: key.longest_prompt(),
            new_tokens: NEW_TOKENS,
            has_audio: false,
        })?;
        let stop_ids = stop_ids(self.model, &tokenizer, None)?;
        let results = self.measure_each(device, |name, adapter, device| {
            let mut session = TokenSession::open(&self.opening(adapter, sizes), device, |_| Ok(()))?;
            let progress = self.progress(name, key.rows.len());
            let on_row = |row: usize| progress.done(row);
            let answers = generate_answers(&mut session, &key, self.beams, &stop_ids, &on_row)?;
            let texts = answers.iter().map(|ids| tokenizer.decode(ids, true).map_err(Failure::model));
            let mut measured = Measured::default();
            measured.add_generation(&key.score(texts.collect::<Result<_, _>>()?));
            Ok((measured, session.planned_bytes(), session.into_device()))
        })?;
        Ok(Results { questions: questions_of_key(&key), ..results })
    }

    /// Word error rates. Each model encodes the clips itself, the second one with its adapter.
    fn by_transcription(&self, device: AnyDevice) -> Result<Results, Failure> {
        let model = self.model;
        let request = self.request(None)?;
        let sets = read_eval_sets(self.recipe, None, model, &request, self.access)?;
        let loss = sets.loss.expect("a set to evaluate was read");
        self.warn(&loss.warnings);
        let tokenizer = read_tokenizer(model).map_err(Failure::model)?;
        let transcripts = Transcripts::of(&loss.set, self.recipe.eval.limit, &tokenizer)?;
        let sizes = self.generation_sizes(Prompts {
            rows: transcripts.rows.len(),
            longest_prompt: transcripts.longest_prompt(),
            new_tokens: transcripts.new_tokens,
            has_audio: loss.set.clips().is_some(),
        })?;
        let stop_ids = stop_ids(model, &tokenizer, None)?;
        let results = self.measure_each(device, |name, adapter, mut device| {
            let opening = self.opening(adapter, sizes);
            let mut encoded = None;
            if let Some(clips) = loss.set.clips() {
                let request = Request { audio: AudioInput::Embeddings, ..opening.request()? };
                let (rows, freed) =
                    encode_clips(clips.store(), &request, (model, adapter), device, self.say)?;
                (encoded, device) = (Some(rows), freed);
            }
            let mut session = TokenSession::open(&opening, device, |_| Ok(()))?;
            let answers = (&tokenizer, &stop_ids);
            let progress = self.progress(name, transcripts.rows.len());
            let on_row = |row: usize| progress.done(row);
            let texts =
                transcripts.transcribe(&mut session, &loss.set, encoded.as_ref(), answers, &on_row)?;
            let mut measured = Measured::default();
            measured.add_transcripts(&transcripts.score(texts));
            Ok((measured, session.planned_bytes(), session.into_device()))
        })?;
        Ok(Results { questions: transcripts.questions(), ..results })
    }

    /// Measures the base, then the base with the adapter if there is one: only one model is loaded at a time.
    fn measure_each(
        &self,
        device: AnyDevice,
        mut measure: impl FnMut(&str, Option<&AdapterFile>, AnyDevice) -> Result<Found, Failure>,
    ) -> Result<Results, Failure> {
        let mut most_bytes = 0;
        let mut next = |name: &str, adapter: Option<&AdapterFile>, device: AnyDevice| {
            (self.say)(&format!("evaluating the {name}"));
            let (measured, planned_bytes, freed) = measure(name, adapter, device)?;
            most_bytes = planned_bytes.max(most_bytes);
            Ok::<_, Failure>((measured, freed))
        };
        let (base, mut device) = next("base", None, device)?;
        let mut adapted = None;
        if let Some(adapter) = self.adapter {
            let (measured, freed) = next("adapter", Some(adapter), device)?;
            (adapted, device) = (Some(measured), freed);
        }
        let measured_bytes = match device.memory() {
            Some(memory) => Some(memory.peak_bytes),
            None => read_rss().map(|memory| memory.peak_bytes),
        };
        let memory = [("planned_bytes", Some(most_bytes)), ("measured_bytes", measured_bytes)];
        let about = memory.into_iter().map(|(name, bytes)| (name.to_string(), json!(bytes))).collect();
        Ok(Results { about, questions: vec![], base, adapter: adapted })
    }

    /// The largest sizes that fit for both models. An evaluation that does not fit is refused before any weight is
    /// read.
    fn generation_sizes(&self, prompts: Prompts) -> Result<Sizes, Failure> {
        let requests: Vec<Request> = self.subjects()?.into_iter().map(|subject| subject.request).collect();
        let context = (prompts.longest_prompt + prompts.new_tokens).min(requests[0].spec.max_positions);
        let mut refused = None;
        let several = [MOST_SLOTS, 4, 2, 1].map(|slots| slots.min(prompts.rows));
        for slots in if self.beams > 1 { vec![self.beams] } else { several.to_vec() } {
            let sizes = Sizes {
                slots,
                context: Some(context),
                cache_tokens: None,
                new_tokens: DEFAULT_NEW_TOKENS,
                budget: self.budget,
                has_audio: prompts.has_audio,
            };
            let plan = |request| plan_generation(request, self.model, self.place, &sizes);
            let plans = requests.iter().map(plan);
            match plans.collect::<Result<Vec<GenerationPlan>, Failure>>() {
                Ok(plans) => {
                    if let Some(largest) = plans.iter().max_by_key(|plan| plan.peak_bytes) {
                        (self.on_plan)(LargestPlan::Generation(largest));
                    }
                    return Ok(sizes);
                }
                Err(failure) => refused = Some(failure),
            }
        }
        // The failure's own hints name options of `smidgen generate`.
        let failure = refused.expect("there is a size to try");
        Err(failure.without_hints().hint("raise `memory.budget`, or evaluate shorter rows"))
    }

    fn opening<'b>(&'b self, adapter: Option<&'b AdapterFile>, sizes: Sizes) -> Opening<'b> {
        let Evaluation { model, place, arithmetic, threads, .. } = *self;
        Opening { model, adapter, base: self.recipe.model.storage(), place, arithmetic, threads, sizes }
    }

    fn request(&self, adapter: Option<&AdapterFile>) -> Result<Request, Failure> {
        let request = build_adapted_request(self.model, adapter)?;
        check_range(&request.spec.model_type, self.arithmetic)?;
        Ok(Request {
            storage: build_storage(self.recipe.model.storage(), &request.spec, self.model),
            device: self.place.kind(),
            precision: self.arithmetic.precision(),
            threads: self.threads,
            ..request
        })
    }

    /// The base, and the base with the adapter if there is one.
    fn subjects(&self) -> Result<Vec<Subject<'_>>, Failure> {
        let adapters = [None].into_iter().chain(self.adapter.map(Some));
        adapters.map(|adapter| Ok(Subject { request: self.request(adapter)?, adapter })).collect()
    }

    fn progress(&self, name: &str, total: usize) -> CountedProgress {
        CountedProgress::new(format!("evaluating the {name}"), total, self.quiet)
    }

    fn warn<'w>(&self, warnings: impl IntoIterator<Item = &'w String>) {
        warnings.into_iter().for_each(|warning| (self.say)(&format!("{WARNING} `data.eval`: {warning}")));
    }

    /// The task, the model and the data, for the results file.
    fn about(&self) -> Result<Map<String, Json>, Failure> {
        let data = &self.recipe.data;
        let mut files = Vec::new();
        if data.eval.is_empty() {
            for source in training_sources(data) {
                files.extend(data_files(source.paths, source.key, self.access)?);
            }
        } else {
            files = data_files(&data.eval, "data.eval", self.access)?;
        }
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let mut about = Map::from_iter([
            ("task".to_owned(), json!(self.recipe.eval.task.to_string())),
            ("model".to_owned(), json!(self.recipe.model.path.to_string())),
            ("base_weights".to_owned(), json!(self.recipe.model.base.to_string())),
            ("device".to_owned(), json!(self.place.describe())),
            ("compute".to_owned(), json!(self.arithmetic.name())),
            ("data".to_owned(), json!(files)),
            ("answer".to_owned(), json!(self.recipe.eval.answer)),
        ]);
        if let Some(adapter) = self.adapter {
            about.insert("adapter_path".to_owned(), json!(adapter.path().display().to_string()));
        }
        if self.recipe.eval.task == EvalTask::Generate {
            about.insert("beams".to_owned(), json!(self.beams));
            about.insert("new_tokens".to_owned(), json!(NEW_TOKENS));
        }
        Ok(about)
    }
}
