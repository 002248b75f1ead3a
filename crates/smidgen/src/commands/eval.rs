//! `smidgen eval RECIPE|RUN`: the evaluation rows of a recipe, scored by the base model and by the trained one.
//!
//! The two models run one after the other, with plans of the same sizes. Their scores go to stdout, the budget table of
//! `--plan` to stderr, and the record of every row to a file: the file of `--out`, or `eval.json` in the folder of a
//! run, which holds the last results of each task.

use super::original::{open_adapter, trained_model};
use super::recipe_args::read_recipe;
use crate::console::colour::{NOTE, WARNING};
use crate::console::downloads::hub_access;
use crate::console::progress::{CountedProgress, say};
use crate::console::stdout::{print_json, print_text};
use crate::eval::evaluator::{EvalPlan, EvalResources, Evaluator, Subject, plan_evaluation};
use crate::eval::generation::{AnswerKey, NEW_TOKENS, generate_answers};
use crate::eval::results::{Measured, Results, questions_of_choices, questions_of_key, questions_of_loss};
use crate::eval::transcription::Transcripts;
use crate::failure::Failure;
use crate::generate::session::{Opening, TokenSession};
use crate::generate::stop::stop_ids;
use crate::machine::host;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::audio::audio_rows;
use crate::plan::budget::{JobBudget, budget_on};
use crate::plan::devices::Place;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, GenerationPlan, Sizes, plan_generation};
use crate::plan::job::check_compute;
use crate::plan::model::{build_storage, open_model};
use crate::plan::product::Product;
use crate::report::evaluation_table::render_evaluation_table;
use crate::report::generation_table::render_generation_table;
use crate::report::score_table::render_score_table;
use crate::rows::choice::ChoiceSet;
use crate::rows::keys::{data_files, training_sources};
use crate::rows::sets::{EvalSets, read_eval_questions, read_eval_sets};
use crate::session::adapted::build_adapted_request;
use crate::session::encoding::encode_clips;
use crate::session::likelihood::{check_finite, evaluated_samples};
use crate::train::metrics::read_rss;
use serde_json::{Map, Value as Json, json};
use smidgen_compile::Request;
use smidgen_compile::model::audio::AudioInput;
use smidgen_data::prepare::read_tokenizer;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::whole_file::write_whole;
use smidgen_hub::{Access, Want};
use smidgen_recipe::{BaseFormat, EvalTask, Init, ModelPath, Recipe};
use smidgen_runtime::{AnyDevice, Device};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A recipe, or the folder of a run
    #[arg(value_name = "RECIPE|RUN")]
    target: PathBuf,
    /// Keys of the recipe to override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The folder of the adapter, or of its run [default: the adapter of the run, or of the recipe's `output.dir`]
    #[arg(long, value_name = "DIR", conflicts_with = "base")]
    adapter: Option<PathBuf>,
    /// Evaluate only the base model
    #[arg(long)]
    base: bool,
    /// Task: loss, choice, generate or wer [default: the recipe's `eval.task`]
    #[arg(long)]
    task: Option<String>,
    /// Maximum rows (0 = all) [default: the recipe's `eval.limit`]
    #[arg(long, value_name = "ROWS")]
    limit: Option<usize>,
    /// Number of beams for `--task generate` (1 = greedy)
    #[arg(long, default_value_t = 1)]
    beams: usize,
    /// Print the budget table before the evaluation
    #[arg(long)]
    plan: bool,
    /// Print JSON with the record of each row, instead of the table
    #[arg(long)]
    json: bool,
    /// File for that JSON [default: `eval.json` in the folder of the run, under the name of the task]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Sequences that are generated at the same time, if they fit.
const MOST_SLOTS: usize = 8;

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    if args.beams == 0 {
        return Err(Failure::command("`--beams` must be at least 1"));
    }
    let (mut recipe, run_folder) = read_target(args)?;
    if recipe.data.eval.is_empty() && recipe.data.split == 0.0 {
        return Err(Failure::recipe("nothing to evaluate: `data.eval` names no file")
            .hint("set it in the recipe or on the command line: `data.eval=test.json`"));
    }
    if args.beams > 1 && recipe.eval.task != EvalTask::Generate {
        return Err(Failure::command(format!(
            "`--beams` needs `--task generate`, the task is `{}`",
            recipe.eval.task
        )));
    }
    let made = evaluated_model(args, &recipe, run_folder.as_deref());
    if let Some(made) = &made {
        if !quiet {
            say(&format!("the run trained the base weights: evaluating `{}`", made.display()));
        }
        (recipe.model.path, recipe.model.base) = (ModelPath::folder(made), BaseFormat::AsStored);
    }
    let mut model = open_model(&recipe.model.path, Want::Weights, &hub_access(quiet))?;
    if recipe.adapter.init == Init::BuiltinSpeech {
        model.stop_merging_speech();
    }
    if !model.has_weights() {
        let place = model.path().display();
        return Err(Failure::model(format!("`{place}` has a config but no weights")));
    }
    let adapter = match made {
        Some(_) => None,
        None => find_adapter(args, &recipe, run_folder.as_deref(), quiet)?,
    };
    let mut place = Place::find(recipe.memory.device, true)?;
    check_compute(recipe.model.compute, &place)?;
    let budget = budget_on(&place, recipe.memory.budget)?;
    let arithmetic = place.arithmetic(recipe.model.compute);
    let arithmetic = match recipe.eval.task {
        EvalTask::Loss | EvalTask::Choice => arithmetic,
        EvalTask::Generate | EvalTask::Wer => arithmetic.token_by_token(),
    };
    let threads = host::threads(recipe.memory.threads)?;
    // Opened before planning, because the plan includes the memory of the driver's context.
    let device = place.open_and_measure(threads, arithmetic)?;
    let (recipe, model, adapter, place) = (&recipe, &model, adapter.as_ref(), &place);
    let shows_plan = args.plan && !quiet;
    let run = Evaluation { recipe, model, adapter, place, arithmetic, threads, budget, shows_plan, quiet };
    budget.note().into_iter().for_each(|note| run.say(&format!("{NOTE} {note}")));
    let mut results = match recipe.eval.task {
        EvalTask::Loss | EvalTask::Choice => run.by_likelihood(device)?,
        EvalTask::Generate => run.by_generation(device, args.beams)?,
        EvalTask::Wer => run.by_transcription(device)?,
    };
    results.about.extend(run.about(args.beams)?);
    let json = results.render_json();
    let text = format!("{json:#}\n");
    let out = match (&args.out, run_folder) {
        (Some(out), _) => Some((out.clone(), text.clone())),
        (None, Some(folder)) => {
            let out = folder.join("eval.json");
            let all = with_earlier_tasks(&out, &recipe.eval.task.to_string(), json);
            Some((out, format!("{all:#}\n")))
        }
        (None, None) => None,
    };
    if let Some((out, text)) = &out {
        write_whole(out, |file| file.write_all(text.as_bytes())).map_err(Failure::disk)?;
    }
    match args.json {
        true => print_json(&text)?,
        false => print_text(&render_score_table(&results))?,
    }
    if let Some((out, _)) = out.filter(|_| !quiet) {
        say(&format!("results of each row are in `{}`", out.display()));
    }
    Ok(())
}

/// Adds the results of this task to those of other tasks in the file. A file from before 0.11 holds a single result,
/// which names its task.
fn with_earlier_tasks(path: &Path, task: &str, result: Json) -> Json {
    let earlier = std::fs::read_to_string(path).ok().and_then(|text| serde_json::from_str(&text).ok());
    let mut tasks = match earlier {
        Some(Json::Object(old)) => match old.get("task") {
            Some(Json::String(name)) => Map::from_iter([(name.clone(), Json::Object(old))]),
            _ => old,
        },
        _ => Map::new(),
    };
    tasks.insert(task.to_owned(), result);
    Json::Object(tasks)
}

fn read_target(args: &Args) -> Result<(Recipe, Option<PathBuf>), Failure> {
    let is_run = args.target.is_dir();
    let path = if is_run { args.target.join("job.toml") } else { args.target.clone() };
    if is_run && !path.is_file() {
        let place = args.target.display();
        return Err(Failure::command(format!("`{place}` is not the folder of a run: it has no `job.toml`")));
    }
    let mut overrides = args.overrides.clone();
    let names = |key: &str| {
        args.overrides.iter().any(|word| word.strip_prefix(key).is_some_and(|value| !value.is_empty()))
    };
    if names("data.eval=") && !names("data.split=") {
        // The rows that the recipe holds out are not those to evaluate.
        overrides.push("data.split=0".to_owned());
    }
    overrides.extend(args.task.iter().map(|task| format!("eval.task={task}")));
    overrides.extend(args.limit.map(|limit| format!("eval.limit={limit}")));
    let (_, recipe) = read_recipe(&path, &overrides)?;
    Ok((recipe, is_run.then(|| args.target.clone())))
}

/// The model that a run made by training the base weights; `None` if `--base` or `--adapter` selects something else.
fn evaluated_model(args: &Args, recipe: &Recipe, run_folder: Option<&Path>) -> Option<PathBuf> {
    let is_wanted = !args.base && args.adapter.is_none() && Product::of(recipe) == Product::Model;
    trained_model(run_folder.unwrap_or(&recipe.output.dir.resolved)).filter(|_| is_wanted)
}

fn find_adapter(
    args: &Args,
    recipe: &Recipe,
    run_folder: Option<&Path>,
    quiet: bool,
) -> Result<Option<AdapterFile>, Failure> {
    let open = |path: &Path| open_adapter(path).map(Some);
    if args.base {
        return Ok(None);
    }
    if let Some(path) = &args.adapter {
        return open(path);
    }
    let trained = run_folder.unwrap_or(&recipe.output.dir.resolved);
    if trained.join("adapter").is_dir() {
        return open(trained);
    }
    if !quiet {
        let product = Product::of(recipe).folder();
        say(&format!("there is no {product} in `{}` yet: evaluating the base model only", trained.display()));
    }
    Ok(None)
}

/// The inputs of an evaluation.
struct Evaluation<'a> {
    recipe: &'a Recipe,
    model: &'a Model,
    adapter: Option<&'a AdapterFile>,
    place: &'a Place,
    arithmetic: Arithmetic,
    threads: usize,
    budget: JobBudget,
    shows_plan: bool,
    quiet: bool,
}

impl Evaluation<'_> {
    fn say(&self, line: &str) {
        if !self.quiet {
            say(line);
        }
    }

    fn progress(&self, name: &str, total: usize) -> CountedProgress {
        CountedProgress::new(format!("evaluating the {name}"), total, self.quiet)
    }

    fn request(&self, adapter: Option<&AdapterFile>) -> Result<Request, Failure> {
        let request = build_adapted_request(self.model, adapter)?;
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
        let mut subjects = vec![Subject { request: self.request(None)?, adapter: None }];
        if let Some(adapter) = self.adapter {
            subjects.push(Subject { request: self.request(Some(adapter))?, adapter: Some(adapter) });
        }
        Ok(subjects)
    }

    fn access(&self) -> Access {
        hub_access(self.quiet)
    }

    fn about(&self, beams: usize) -> Result<Map<String, Json>, Failure> {
        let data = &self.recipe.data;
        let mut files = Vec::new();
        match data.eval.is_empty() {
            false => files = data_files(&data.eval, "data.eval", &self.access())?,
            true => {
                for source in training_sources(data) {
                    files.extend(data_files(source.paths, source.key, &self.access())?);
                }
            }
        }
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let mut about = json!({
            "task": self.recipe.eval.task.to_string(),
            "model": self.recipe.model.path.to_string(),
            "base_weights": self.recipe.model.base.to_string(),
            "device": self.place.describe(),
            "compute": self.arithmetic.name(),
            "data": files,
            "answer": self.recipe.eval.answer,
        });
        if let Some(adapter) = self.adapter {
            about["adapter_path"] = json!(adapter.path().display().to_string());
        }
        if self.recipe.eval.task == EvalTask::Generate {
            about["beams"] = json!(beams);
            about["new_tokens"] = json!(NEW_TOKENS);
        }
        match about {
            Json::Object(about) => Ok(about),
            other => unreachable!("an object, not {other}"),
        }
    }

    fn by_likelihood(&self, mut device: AnyDevice) -> Result<Results, Failure> {
        let (recipe, model, limit) = (self.recipe, self.model, self.recipe.eval.limit);
        let mut subjects = self.subjects()?;
        let sets = read_eval_sets(recipe, None, model, &subjects[0].request, &self.access())?;
        let EvalSets { loss, choices } = &sets;
        let of_loss = loss.iter().flat_map(|loss| &loss.warnings);
        let of_choices = choices.iter().flat_map(|choices| &choices.warnings);
        of_loss.chain(of_choices).for_each(|warning| self.say(&format!("{WARNING} `data.eval`: {warning}")));
        if let Some(clips) = loss.as_ref().and_then(|loss| loss.set.clips()) {
            // Both subjects start from the same rows, so that only the adapter differs.
            let audio = audio_rows(subjects.iter().map(|subject| &subject.request));
            subjects.iter_mut().for_each(|subject| subject.request.audio = audio);
            let say = |line: &str| self.say(line);
            let store = clips.store();
            let (encoded, freed) = encode_clips(store, &subjects[0].request, (model, None), device, &say)?;
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
        if let Some(largest) = plans.iter().max_by_key(|plan| plan.peak_bytes).filter(|_| self.shows_plan) {
            self.say(render_evaluation_table(largest, means).trim_end());
        }
        let planned_bytes = plans.iter().map(|plan| plan.peak_bytes).max();
        let mut measured = Vec::new();
        for (subject, plan) in subjects.iter().zip(plans) {
            let (found, freed) = self.measure(subject, plan, &sets, device)?;
            measured.push(found);
            device = freed;
        }
        let questions = match (choices, loss) {
            (Some(choices), _) => questions_of_choices(choices),
            (None, Some(loss)) => questions_of_loss(&loss.set, measured[0].records.len()),
            (None, None) => unreachable!("a set to evaluate was read"),
        };
        Ok(collect(questions, measured, memory(planned_bytes, &mut device)))
    }

    /// Takes the device and returns it, so that only one model is loaded at a time.
    fn measure(
        &self,
        subject: &Subject<'_>,
        plan: EvalPlan,
        sets: &EvalSets,
        device: AnyDevice,
    ) -> Result<(Measured, AnyDevice), Failure> {
        let name = if subject.adapter.is_some() { "adapter" } else { "base" };
        let what = format!("the evaluation of the {name}");
        self.say(&format!("evaluating the {name}"));
        let mut evaluator = Evaluator::load(subject, self.model, plan, device)?;
        let mut measured = Measured::default();
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
        Ok((measured, evaluator.into_device()))
    }

    fn by_generation(&self, mut device: AnyDevice, beams: usize) -> Result<Results, Failure> {
        let (recipe, model) = (self.recipe, self.model);
        let tokenizer = read_tokenizer(model).map_err(Failure::model)?;
        let request = self.request(None)?;
        let questions = read_eval_questions(recipe, &tokenizer, model, &request, &self.access())?;
        let key = AnswerKey::build(&questions, &recipe.eval.answer, &tokenizer)?;
        questions.warnings.iter().for_each(|warning| self.say(&format!("{WARNING} `data.eval`: {warning}")));
        drop(questions);
        let prompts = Prompts {
            rows: key.rows.len(),
            longest_prompt: key.longest_prompt(),
            new_tokens: NEW_TOKENS,
            has_audio: false,
        };
        let sizes = self.generation_sizes(prompts, beams)?;
        let (mut measured, mut planned_bytes) = (Vec::new(), None);
        for adapter in [None].into_iter().chain(self.adapter.map(Some)) {
            let opening = self.opening(adapter, sizes);
            let (found, planned, freed) =
                self.measure_generation(&opening, device, &key, &tokenizer, beams)?;
            measured.push(found);
            planned_bytes = planned_bytes.max(Some(planned));
            device = freed;
        }
        Ok(collect(questions_of_key(&key), measured, memory(planned_bytes, &mut device)))
    }

    /// Word error rates. Each subject encodes the clips itself, the second one with its adapter.
    fn by_transcription(&self, mut device: AnyDevice) -> Result<Results, Failure> {
        let (recipe, model) = (self.recipe, self.model);
        let request = self.request(None)?;
        let sets = read_eval_sets(recipe, None, model, &request, &self.access())?;
        let loss = sets.loss.expect("a set to evaluate was read");
        loss.warnings.iter().for_each(|warning| self.say(&format!("{WARNING} `data.eval`: {warning}")));
        let tokenizer = read_tokenizer(model).map_err(Failure::model)?;
        let transcripts = Transcripts::of(&loss.set, recipe.eval.limit, &tokenizer)?;
        let prompts = Prompts {
            rows: transcripts.rows.len(),
            longest_prompt: transcripts.longest_prompt(),
            new_tokens: transcripts.new_tokens,
            has_audio: loss.set.clips().is_some(),
        };
        let sizes = self.generation_sizes(prompts, 1)?;
        let stop_ids = stop_ids(model, &tokenizer, None)?;
        let (mut measured, mut planned_bytes) = (Vec::new(), None);
        for adapter in [None].into_iter().chain(self.adapter.map(Some)) {
            let opening = self.opening(adapter, sizes);
            let mut encoded = None;
            if let Some(clips) = loss.set.clips() {
                let request = Request { audio: AudioInput::Embeddings, ..opening.request()? };
                let say = |line: &str| self.say(line);
                let (rows, freed) = encode_clips(clips.store(), &request, (model, adapter), device, &say)?;
                (encoded, device) = (Some(rows), freed);
            }
            let name = if adapter.is_some() { "adapter" } else { "base" };
            self.say(&format!("evaluating the {name}"));
            let mut session = TokenSession::open(&opening, device, |_| Ok(()))?;
            let answers = (&tokenizer, &stop_ids);
            let progress = self.progress(name, transcripts.rows.len());
            let on_row = |row: usize| progress.done(row);
            let texts =
                transcripts.transcribe(&mut session, &loss.set, encoded.as_ref(), answers, &on_row)?;
            let mut own = Measured::default();
            own.add_transcripts(&transcripts.score(texts));
            measured.push(own);
            planned_bytes = planned_bytes.max(Some(session.planned_bytes()));
            device = session.into_device();
        }
        Ok(collect(transcripts.questions(), measured, memory(planned_bytes, &mut device)))
    }

    /// The largest sizes that fit for both models. An evaluation that does not fit is refused before any weight is
    /// read.
    fn generation_sizes(&self, prompts: Prompts, beams: usize) -> Result<Sizes, Failure> {
        let requests: Vec<Request> = self.subjects()?.into_iter().map(|subject| subject.request).collect();
        let context = (prompts.longest_prompt + prompts.new_tokens).min(requests[0].spec.max_positions);
        let mut refused = None;
        let several = [MOST_SLOTS, 4, 2, 1].map(|slots| slots.min(prompts.rows));
        for slots in if beams > 1 { vec![beams] } else { several.to_vec() } {
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
                    let largest = plans.iter().max_by_key(|plan| plan.peak_bytes);
                    if let Some(largest) = largest.filter(|_| self.shows_plan) {
                        self.say(render_generation_table(largest).trim_end());
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

    fn opening<'a>(&'a self, adapter: Option<&'a AdapterFile>, sizes: Sizes) -> Opening<'a> {
        let Evaluation { model, place, arithmetic, threads, .. } = *self;
        Opening { model, adapter, base: self.recipe.model.storage(), place, arithmetic, threads, sizes }
    }

    fn measure_generation(
        &self,
        opening: &Opening<'_>,
        device: AnyDevice,
        key: &AnswerKey,
        tokenizer: &Tokenizer,
        beams: usize,
    ) -> Result<(Measured, u64, AnyDevice), Failure> {
        let name = if opening.adapter.is_some() { "adapter" } else { "base" };
        self.say(&format!("evaluating the {name}"));
        let mut session = TokenSession::open(opening, device, |_| Ok(()))?;
        let stop_ids = stop_ids(self.model, tokenizer, None)?;
        let progress = self.progress(name, key.rows.len());
        let answers = generate_answers(&mut session, key, beams, &stop_ids, &|row| progress.done(row))?;
        drop(progress);
        let texts = answers.iter().map(|ids| tokenizer.decode(ids, true).map_err(Failure::model));
        let scores = key.score(texts.collect::<Result<_, _>>()?);
        let mut measured = Measured::default();
        measured.add_generation(&scores);
        Ok((measured, session.planned_bytes(), session.into_device()))
    }
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

/// The planned memory of the larger of the two models, and the measured peak.
fn memory(planned_bytes: Option<u64>, device: &mut AnyDevice) -> Map<String, Json> {
    let measured_bytes = match device.memory() {
        Some(memory) => Some(memory.peak_bytes),
        None => read_rss().map(|memory| memory.peak_bytes),
    };
    let both = [("planned_bytes", planned_bytes), ("measured_bytes", measured_bytes)];
    both.into_iter().map(|(name, bytes)| (name.to_string(), json!(bytes))).collect()
}

fn collect(questions: Vec<Json>, measured: Vec<Measured>, about: Map<String, Json>) -> Results {
    let mut measured = measured.into_iter();
    let base = measured.next().expect("the base is always evaluated");
    Results { about, questions, base, adapter: measured.next() }
}
