//! Answers that a run generates, scores and trains on: GRPO without given answers.
//!
//! A batch of prompts gets its answers from the policy as it is, in the plan's entry point `decode`, whose caches use the
//! memory that the steps use afterwards. The answers become a token set with rewards, on which `num_iterations` updates are
//! made. A random number depends on the seed, the batch, the prompt, the answer and the position alone, so the same run gives
//! the same answers, and a resumed run generates again what it lost.
//! Every answer is a line of `rollouts.jsonl`; of a very long run not every batch is.
//! Left out: advantages and losses (`objective_numbers.rs`).

use super::objective_numbers::{Counts, advantages};
use crate::console::colour::WARNING;
use crate::failure::Failure;
use crate::generate::batch::{News, Prompt, Settings, continue_all};
use crate::generate::decoder::Decoder;
use crate::generate::sampler::Sampling;
use crate::generate::stop::{StoppedBy, stop_ids};
use crate::generate::stops::Stops;
use crate::generate::stream::TextStream;
use crate::logs::appended::AppendedFile;
use crate::logs::metrics::{ROLLOUTS_FILE, open_metrics};
use crate::logs::thinning::stride;
use crate::plan::job::Job;
use crate::rewards::{Candidate, Rewards};
use crate::rows::keys::template_choice;
use crate::rows::prompts::{Prompt as Row, Prompts};
use crate::run_folder::run_dir::RunDir;
use serde::{Deserialize, Serialize};
use serde_json::json;
use smidgen_compile::DecodeShape;
use smidgen_data::example::{GroupKind, RowFormat};
use smidgen_data::mask::EncodedSample;
use smidgen_data::template::choose_template;
use smidgen_data::token_builder::TokenSetBuilder;
use smidgen_data::tokens::{TokenLimits, TokenSet};
use smidgen_formats::json_file::read_json_file;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::whole_file::write_whole;
use smidgen_ir::objective::RowsNeeded;
use smidgen_recipe::{AnswerSettings, Overflow};
use smidgen_runtime::{Device, Executor, counter};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

/// The file of a checkpoint with the answers of the current batch.
const ANSWERS_FILE: &str = "rollouts.json";
/// Steps whose answers are all written; of later ones fewer and fewer are.
const DENSE_STEPS: u64 = 1 << 11;
/// The answers of a batch with thousands of long ones take some MiB.
const MOST_ANSWERS_BYTES: u64 = 1 << 30;

pub struct Rollouts<'a> {
    job: &'a Job,
    prompts: &'a [Row],
    tokenizer: &'a Tokenizer,
    settings: AnswerSettings,
    decoder: Decoder,
    rewards: Rewards,
    sampling: Sampling,
    stop_ids: BTreeSet<u32>,
    stops: Vec<String>,
    batch: Option<Batch>,
    /// `None` on a rank that does not write.
    log: Option<AppendedFile>,
    groups: Groups,
}

/// The answers of a batch of prompts.
struct Batch {
    number: u64,
    answers: Vec<Answer>,
    set: Rc<TokenSet>,
    figures: BTreeMap<String, f64>,
}

/// An answer, as checkpoints store it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Answer {
    /// The sample of its prompt.
    prompt: u32,
    /// The token that ended it included.
    ids: Vec<u32>,
    text: String,
    stopped_by: String,
    scores: Vec<f64>,
    reward: f64,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    batch: u64,
    answers: Vec<Answer>,
}

/// Groups of answers to one prompt, and those with equal rewards, from which nothing is learned.
#[derive(Clone, Copy, Debug, Default)]
struct Groups {
    all: u64,
    equal: u64,
    /// Whether a batch without any signal was reported.
    is_reported: bool,
}

impl<'a> Rollouts<'a> {
    /// `None` if the run generates nothing. Starts the programs that score answers; a run that continues gets the answers
    /// of its batch from the checkpoint.
    pub fn of<D: Device>(
        job: &'a Job,
        executor: &Executor<D>,
        dir: &RunDir,
        first_step: u64,
    ) -> Result<Option<Rollouts<'a>>, Failure> {
        let recipe = &job.recipe;
        let Some((shape, prompts)) = DecodeShape::planned(executor.plan()).zip(job.data.prompts()) else {
            return Ok(None);
        };
        let mut rewards = Rewards::of(recipe)?;
        rewards.start()?;
        let Prompts { rows: prompts, tokenizer } = prompts;
        let aim = &recipe.train.aim;
        // The rows were rendered with it, so it can be read; strings may have none.
        let template = choose_template(&template_choice(&recipe.data.template), RowFormat::Chat, tokenizer);
        let template = template.ok().flatten().map(|template| template.kind);
        let mut rollouts = Rollouts {
            job,
            prompts,
            settings: recipe.answer_settings(),
            stop_ids: stop_ids(&job.model, tokenizer, template.as_ref())?,
            decoder: Decoder::of(executor.plan(), &job.request.spec, shape),
            tokenizer,
            rewards,
            sampling: Sampling {
                temperature: aim.temperature.unwrap_or(1.0),
                top_k: aim.top_k.unwrap_or(0),
                top_p: aim.top_p.unwrap_or(1.0),
                ..Sampling::default()
            },
            stops: aim.stop.clone().unwrap_or_default(),
            batch: None,
            log: match dir.is_written() {
                true => Some(open_metrics(&dir.file(ROLLOUTS_FILE), first_step)?),
                false => None,
            },
            groups: Groups::default(),
        };
        if first_step > 0 {
            rollouts.read(&dir.checkpoint(first_step))?;
        }
        Ok(Some(rollouts))
    }

    /// Whether a step has to generate answers first.
    pub fn lacks(&self, step: u64) -> bool {
        let number = self.job.rows().batches.batch_of(step);
        self.batch.as_ref().is_none_or(|batch| batch.number != number)
    }

    /// The answers of the current batch.
    ///
    /// # Panics
    /// Before any answers were generated.
    pub fn set(&self) -> Rc<TokenSet> {
        Rc::clone(&self.batch.as_ref().expect("answers are generated before a step").set)
    }

    pub fn figures(&self) -> BTreeMap<String, f64> {
        self.batch.as_ref().map(|batch| batch.figures.clone()).unwrap_or_default()
    }

    /// Generates and scores the answers of a step's batch. Returns a warning if none of them differ.
    pub fn generate<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        step: u64,
    ) -> Result<Option<String>, Failure> {
        let batches = &self.job.rows().batches;
        let (number, prompts) = (batches.batch_of(step), batches.step_samples(step).samples.to_vec());
        let mut answers = self.continue_prompts(executor, number, &prompts)?;
        self.score(&mut answers)?;
        let batch = self.batch_of(number, answers)?;
        let are_equal = |group: &&[Answer]| group.iter().all(|answer| answer.reward == group[0].reward);
        let equal = batch.answers.chunks(self.settings.num_generations).filter(are_equal).count();
        self.groups.all += prompts.len() as u64;
        self.groups.equal += equal as u64;
        self.write_log(&batch, step)?;
        self.batch = Some(batch);
        if equal < prompts.len() || std::mem::replace(&mut self.groups.is_reported, true) {
            return Ok(None);
        }
        Ok(Some(format!(
            "step {}: all answers to each prompt have the same reward, so nothing is learned from them",
            step + 1
        )))
    }

    /// What to say at the end about groups without a signal.
    pub fn summary(&self) -> Option<String> {
        let Groups { all, equal, .. } = self.groups;
        (equal > 0).then(|| {
            let warning = if 2 * equal > all { format!("{WARNING} ") } else { String::new() };
            format!("{warning}{equal} of {all} groups of answers had equal rewards and taught nothing")
        })
    }

    fn continue_prompts<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        batch: u64,
        prompts: &[u32],
    ) -> Result<Vec<Answer>, Failure> {
        let AnswerSettings { num_generations, max_completion_length, .. } = self.settings;
        let (train, seed) = (&self.job.rows().train, self.job.recipe.train.seed);
        let mut ids: Vec<Vec<u32>> = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let mut own = Vec::new();
            train.read(*prompt as usize, &mut own, |_, _| {}).map_err(Failure::disk)?;
            ids.push(own.into_iter().map(|id| id as u32).collect());
        }
        let count = prompts.len() * num_generations;
        let waiting = (0..count).map(|number| {
            let (prompt, answer) = (number / num_generations, number % num_generations);
            let seed = counter::token_key(seed, batch, u64::from(prompts[prompt]), answer as u64);
            Prompt {
                number,
                ids: ids[prompt].clone(),
                settings: Settings {
                    sampling: Sampling { seed, ..self.sampling },
                    max_new: max_completion_length,
                    stop_ids: self.stop_ids.clone(),
                },
                top: None,
            }
        });
        let nothing = |number: usize| Answer {
            prompt: prompts[number / num_generations],
            ids: Vec::new(),
            text: String::new(),
            stopped_by: String::new(),
            scores: Vec::new(),
            reward: 0.0,
        };
        let mut answers: Vec<Answer> = (0..count).map(nothing).collect();
        let mut texts = vec![(TextStream::default(), Stops::of(self.stops.clone())); count];
        let (tokenizer, has_stops) = (self.tokenizer, !self.stops.is_empty());
        let on_news = |News { number, token, stopped, .. }: &News| {
            let (answer, (stream, stops)) = (&mut answers[*number], &mut texts[*number]);
            // The token that ends an answer is trained too: the model learns where to stop.
            let ending = match stopped {
                Some(StoppedBy::Token(id)) => Some(*id),
                _ => None,
            };
            answer.ids.extend(token.or(ending));
            if let Some(stopped) = stopped {
                answer.stopped_by = stopped.name().to_owned();
            }
            if let Some(token) = token.filter(|_| has_stops) {
                stops.push(&stream.push(tokenizer, token).map_err(Failure::model)?);
                if stops.is_reached() {
                    answer.stopped_by = "stop".to_owned();
                    return Ok(false);
                }
            }
            Ok(true)
        };
        continue_all(executor, &mut self.decoder, waiting, true, &mut |_, _, _| Ok(()), on_news)?;
        for answer in &mut answers {
            answer.text = self.tokenizer.decode(&answer.ids, true).map_err(Failure::model)?;
        }
        Ok(answers)
    }

    fn score(&mut self, answers: &mut [Answer]) -> Result<(), Failure> {
        let candidates = answers.iter().map(|answer| Candidate {
            prompt: &self.prompts[answer.prompt as usize],
            text: &answer.text,
            tokens: answer.ids.len(),
            stopped_by: &answer.stopped_by,
        });
        let scored = self.rewards.score(&candidates.collect::<Vec<_>>())?;
        for (answer, (scores, reward)) in answers.iter_mut().zip(scored) {
            // Rewards are stored as f32.
            (answer.scores, answer.reward) = (scores, f64::from(reward as f32));
        }
        Ok(())
    }

    /// The token set and the figures of scored answers.
    fn batch_of(&self, number: u64, answers: Vec<Answer>) -> Result<Batch, Failure> {
        let count = self.settings.num_generations;
        let rows = self.job.rows();
        let limits = TokenLimits {
            vocab_size: self.job.request.spec.vocabulary as u32,
            max_tokens: u32::MAX,
            overflow: Overflow::Error,
        };
        let mut builder = TokenSetBuilder::new(limits).needing(RowsNeeded::Answers { count });
        let mut prompt = Vec::new();
        for group in answers.chunks(count) {
            let sample = group[0].prompt as usize;
            prompt.clear();
            rows.train.read(sample, &mut prompt, |_, _| {}).map_err(Failure::disk)?;
            let members = group.iter().map(|answer| {
                let ids =
                    prompt.iter().map(|id| i64::from(*id)).chain(answer.ids.iter().map(|id| i64::from(*id)));
                (EncodedSample::of_tokens(ids.collect(), prompt.len()), answer.reward as f32)
            });
            let members: Vec<(EncodedSample, f32)> = members.collect();
            builder
                .push_group(rows.train.place(sample), GroupKind::Rewarded, &members)
                .map_err(Failure::model)?;
        }
        let set = builder.finish().map_err(Failure::model)?;
        let mut figures = BTreeMap::new();
        let all = answers.len() as f64;
        for (index, name) in self.rewards.names().enumerate() {
            let sum: f64 = answers.iter().map(|answer| answer.scores[index]).sum();
            figures.insert(format!("rewards_{name}_mean"), sum / all);
        }
        let tokens: usize = answers.iter().map(|answer| answer.ids.len()).sum();
        let cut = answers.iter().filter(|answer| answer.stopped_by == StoppedBy::MaxTokens.name()).count();
        figures.insert("completions_mean_length".to_owned(), tokens as f64 / all);
        figures.insert("completions_clipped_ratio".to_owned(), cut as f64 / all);
        Ok(Batch { number, answers, set: Rc::new(set), figures })
    }

    fn advantages(&self, answers: &[Answer]) -> Vec<f64> {
        let rewards: Vec<f64> = answers.iter().map(|answer| answer.reward).collect();
        let AnswerSettings { num_generations, scale, .. } = self.settings;
        advantages(&rewards, num_generations, scale, &mut Counts::default())
    }

    /// Writes a line for each answer, if the step is one of those that are written.
    fn write_log(&mut self, batch: &Batch, step: u64) -> Result<(), Failure> {
        let is_written = batch.number.is_multiple_of(stride(batch.number, DENSE_STEPS));
        let advantages = self.advantages(&batch.answers);
        let prompts = self.prompts;
        let names: Vec<&str> = self.rewards.names().collect();
        let Some(log) = self.log.as_mut().filter(|_| is_written) else { return Ok(()) };
        let mut lines = Vec::new();
        for (answer, advantage) in batch.answers.iter().zip(advantages) {
            let scores: BTreeMap<&str, f64> =
                names.iter().copied().zip(answer.scores.iter().copied()).collect();
            let line = json!({
                "step": step + 1,
                "row": answer.prompt,
                "prompt": prompts[answer.prompt as usize].shown,
                "completion": answer.text,
                "tokens": answer.ids.len(),
                "stopped_by": answer.stopped_by,
                "rewards": scores,
                "reward": answer.reward,
                "advantage": advantage,
            });
            lines.extend(line.to_string().into_bytes());
            lines.push(b'\n');
        }
        log.append(&lines)
    }

    /// Writes what a checkpoint between two updates with the same answers needs.
    pub fn write(&self, folder: &Path) -> Result<(), Failure> {
        self.log.iter().try_for_each(AppendedFile::sync)?;
        let Some(batch) = self.batch.as_ref().filter(|_| self.settings.num_iterations > 1) else {
            return Ok(());
        };
        let stored = Stored { batch: batch.number, answers: batch.answers.clone() };
        let bytes = serde_json::to_vec(&stored).map_err(Failure::disk)?;
        write_whole(&folder.join(ANSWERS_FILE), |out| out.write_all(&bytes)).map_err(Failure::disk)
    }

    /// Reads what [`Self::write`] wrote, if the checkpoint has it.
    fn read(&mut self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(ANSWERS_FILE);
        if self.settings.num_iterations == 1 || !path.exists() {
            return Ok(());
        }
        let Stored { batch, answers } = read_json_file(&path, MOST_ANSWERS_BYTES).map_err(Failure::model)?;
        let (count, scores) = (self.settings.num_generations, self.rewards.names().count());
        let is_whole = |answer: &Answer| {
            (answer.prompt as usize) < self.job.rows().train.len()
                && !answer.ids.is_empty()
                && answer.scores.len() == scores
        };
        if answers.is_empty() || answers.len() % count > 0 || !answers.iter().all(is_whole) {
            return Err(Failure::disk(format!("`{}` is damaged", path.display()))
                .hint("remove that checkpoint folder to continue from the one before"));
        }
        self.batch = Some(self.batch_of(batch, answers)?);
        Ok(())
    }
}

impl std::fmt::Debug for Rollouts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let batch = self.batch.as_ref().map(|batch| batch.number);
        f.debug_struct("Rollouts")
            .field("batch", &batch)
            .field("groups", &self.groups)
            .finish_non_exhaustive()
    }
}
