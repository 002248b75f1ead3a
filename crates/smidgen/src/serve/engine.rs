//! The thread that generates: it takes requests from a queue and continues as many together as the planned cache holds.
//!
//! Requests enter in the order in which they came, also while others are in the middle of their answers, and leave when
//! they end or when nobody reads them any more. Adapters share one base: a request for another adapter waits until the
//! sequences of the loaded one have ended.
//! Left out: HTTP and the form of requests.

use crate::failure::Failure;
use crate::generate::batch::{Batch, News, Prompt};
use crate::generate::session::TokenSession;
use crate::generate::stop::StoppedBy;
use crate::generate::stops::Stops;
use crate::generate::stream::TextStream;
use smidgen_compile::Request;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::tokenizer::Tokenizer;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use tokio::sync::mpsc::UnboundedSender;

/// One answer to generate.
pub struct Work {
    /// Its number among the answers of the same request.
    pub choice: usize,
    /// The number of the adapter; `None` is the base.
    pub adapter: Option<usize>,
    /// Without its number, which the engine gives.
    pub prompt: Prompt,
    /// Texts that end the answer and are not part of it.
    pub stops: Vec<String>,
    pub replies: UnboundedSender<(usize, Reply)>,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Piece {
        text: String,
        tokens: Vec<TokenReply>,
    },
    End {
        /// `stop` or `length`, as OpenAI names them.
        reason: &'static str,
        answer_tokens: usize,
    },
    Failed(String),
}

/// A token with its logarithm of probability, and the most likely ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenReply {
    pub id: u32,
    pub probability: f32,
    pub top: Vec<(u32, f32)>,
}

/// The model with its adapters.
pub struct Engine {
    pub session: TokenSession,
    pub request: Request,
    /// The adapters that can be loaded, all with the same modules.
    pub adapters: Vec<AdapterFile>,
    pub tokenizer: Arc<Tokenizer>,
}

/// An answer that is being generated.
struct Active {
    work: Work,
    stream: TextStream,
    stops: Stops,
    tokens: Vec<TokenReply>,
    answer_tokens: usize,
}

impl Engine {
    /// Runs until every sender of the queue is gone.
    pub fn run(mut self, queue: &Receiver<Work>) {
        let mut waiting: VecDeque<Work> = VecDeque::new();
        let mut active: HashMap<usize, Active> = HashMap::new();
        let mut batch = Batch::new(self.session.shape());
        // The adapter that was loaded with the session is the first one.
        let mut loaded = (!self.adapters.is_empty()).then_some(0);
        let mut number = 0;
        loop {
            if active.is_empty() && waiting.is_empty() {
                let Ok(work) = queue.recv() else { return };
                waiting.push_back(work);
            }
            waiting.extend(queue.try_iter());
            waiting.retain(|work| !work.replies.is_closed());
            while let Some(work) = waiting.front() {
                if work.adapter != loaded && !batch.is_empty() {
                    break;
                }
                let Some(slot) = batch.room(&work.prompt) else { break };
                let Some(mut work) = waiting.pop_front() else { break };
                let entered = if work.adapter == loaded { Ok(()) } else { self.load(work.adapter) };
                loaded = if entered.is_ok() { work.adapter } else { loaded };
                number += 1;
                work.prompt.number = number;
                let entered = entered.and_then(|()| batch.enter(slot, work.prompt.clone()));
                match entered {
                    Ok(()) => drop(active.insert(number, Active::of(work))),
                    Err(failure) => work.fail(&failure),
                }
            }
            if batch.is_empty() {
                continue;
            }
            let (executor, decoder) = self.session.parts();
            match batch.step(executor, decoder) {
                Ok(news) => {
                    for news in news {
                        let number = news.number;
                        let Some(it) = active.get_mut(&number) else { continue };
                        if it.take(&self.tokenizer, news) {
                            batch.remove(self.session.parts().1, number);
                            active.remove(&number);
                        }
                    }
                }
                // Every sequence of the step is lost; the next ones start with an empty cache.
                Err(failure) => {
                    active.drain().for_each(|(_, it)| it.work.fail(&failure));
                    batch = Batch::new(self.session.shape());
                    self.session.reset();
                }
            }
        }
    }

    fn load(&mut self, adapter: Option<usize>) -> Result<(), Failure> {
        let file = adapter.and_then(|number| self.adapters.get(number));
        self.session.load_adapter(&self.request, file)
    }
}

impl Work {
    fn fail(&self, failure: &Failure) {
        // Whoever asked may be gone.
        let _ = self.replies.send((self.choice, Reply::Failed(failure.message.clone())));
    }
}

impl Active {
    fn of(work: Work) -> Active {
        let stops = Stops::of(work.stops.clone());
        Active { work, stream: TextStream::default(), stops, tokens: Vec::new(), answer_tokens: 0 }
    }

    /// Sends what a token adds; returns whether the answer has ended or nobody reads it.
    fn take(&mut self, tokenizer: &Tokenizer, news: News) -> bool {
        let mut text = String::new();
        if let Some(token) = news.token {
            self.answer_tokens += 1;
            self.tokens.extend(news.probabilities.map(|it| TokenReply {
                id: token,
                probability: it.chosen,
                top: it.top,
            }));
            match self.stream.push(tokenizer, token) {
                Ok(piece) => text += &self.stops.push(&piece),
                Err(error) => {
                    self.work.fail(&Failure::model(error));
                    return true;
                }
            }
        }
        if news.stopped.is_some() && !self.stops.is_reached() {
            let rest = self.stream.finish(tokenizer).unwrap_or_default();
            text += &self.stops.push(&rest);
            text += &self.stops.finish();
        }
        let is_over = news.stopped.is_some() || self.stops.is_reached();
        if !text.is_empty() || is_over {
            let tokens = std::mem::take(&mut self.tokens);
            let piece = (self.work.choice, Reply::Piece { text, tokens });
            if self.work.replies.send(piece).is_err() {
                return true;
            }
        }
        if is_over {
            let reason = match news.stopped {
                _ if self.stops.is_reached() => "stop",
                Some(StoppedBy::MaxTokens | StoppedBy::Context) => "length",
                Some(StoppedBy::Token(_) | StoppedBy::Caller) | None => "stop",
            };
            let end = Reply::End { reason, answer_tokens: self.answer_tokens };
            let _ = self.work.replies.send((self.work.choice, end));
        }
        is_over || self.work.replies.is_closed()
    }
}
