//! OpenAI's completions: a request becomes work for the engine, and its replies become the answer.
//!
//! A chat is formatted by the template that the model or its adapter was trained with; tools are given to the template.
//! Both forms of answer are made here, whole and in pieces.

use super::engine::{Reply, TokenReply, Work};
use super::fields::{ApiError, Fields};
use crate::generate::batch::Prompt;
use crate::generate::sampler::Sampling;
use crate::generate::session::Settings;
use hyper::StatusCode;
use serde_json::{Value, json};
use smidgen_compile::DecodeShape;
use smidgen_data::template::TemplateKind;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedSender;

/// What the server serves, the same for all requests.
pub struct Served {
    /// The names of the models, each with the number of its adapter.
    pub models: Vec<(String, Option<usize>)>,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<TemplateKind>,
    pub stop_ids: BTreeSet<u32>,
    pub shape: DecodeShape,
    /// When the server started, in seconds.
    pub started: u64,
    /// Numbers for answers, and for seeds of requests that have none.
    pub count: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Text,
}

/// A request that was read and checked.
pub struct Asked {
    pub endpoint: Endpoint,
    pub model: String,
    pub adapter: Option<usize>,
    pub is_streamed: bool,
    pub includes_usage: bool,
    /// Whether log-probabilities are asked for.
    pub has_probabilities: bool,
    pub prompt_tokens: usize,
    pub prompts: Vec<Prompt>,
    pub stops: Vec<String>,
    pub id: String,
    pub created: u64,
}

/// Choices that one request may ask for.
const MOST_CHOICES: usize = 64;
const MOST_STOPS: usize = 16;
/// Answers of the older endpoint are this long unless the request says otherwise.
const DEFAULT_TEXT_TOKENS: usize = 16;

pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Served {
    pub fn render_models(&self) -> Value {
        let models: Vec<Value> = self.models.iter().map(|(name, _)| self.render_model(name)).collect();
        json!({"object": "list", "data": models})
    }

    pub fn render_model(&self, name: &str) -> Value {
        json!({"id": name, "object": "model", "created": self.started, "owned_by": "smidgen"})
    }

    pub fn find(&self, name: &str) -> Result<Option<usize>, ApiError> {
        let found = self.models.iter().find(|(own, _)| own == name).map(|(_, adapter)| *adapter);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.models.iter().map(|(name, _)| name.as_str()).collect();
            let error = ApiError::new(
                StatusCode::NOT_FOUND,
                format!("the model `{name}` is not served here (served: {})", names.join(", ")),
            );
            ApiError { param: Some("model".to_owned()), ..error }.with_code("model_not_found")
        })
    }

    /// Reads a request.
    pub fn read(&self, endpoint: Endpoint, body: &[u8]) -> Result<Asked, ApiError> {
        let mut fields = Fields::read(body)?;
        let model = fields.text("model")?.ok_or_else(|| ApiError::field("model", "`model` is missing"))?;
        let adapter = self.find(&model)?;
        let texts = match endpoint {
            Endpoint::Chat => vec![self.chat(&mut fields)?],
            Endpoint::Text => self.texts(&mut fields)?,
        };
        let is_streamed = fields.flag("stream")?;
        let options = fields.take("stream_options").unwrap_or_default();
        let choices = fields.count("n", 1, MOST_CHOICES)?.unwrap_or(1);
        let top = match endpoint {
            Endpoint::Chat => {
                let top = fields.count("top_logprobs", 0, 20)?;
                match (fields.flag("logprobs")?, top) {
                    (true, top) => Some(top.unwrap_or(0)),
                    (false, None) => None,
                    (false, Some(_)) => {
                        return Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
                    }
                }
            }
            Endpoint::Text => {
                if fields.flag("echo")? {
                    return Err(ApiError::field("echo", "`echo` is not supported"));
                }
                fields.count("logprobs", 0, 20)?
            }
        };
        let most_new = match (
            fields.count("max_completion_tokens", 1, usize::MAX)?,
            fields.count("max_tokens", 1, usize::MAX)?,
        ) {
            (Some(most), _) | (None, Some(most)) => Some(most),
            (None, None) => (endpoint == Endpoint::Text).then_some(DEFAULT_TEXT_TOKENS),
        };
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let seed = match fields.take("seed") {
            None => self.started.wrapping_mul(1_000_003).wrapping_add(number),
            Some(seed) => {
                let seed =
                    seed.as_i64().ok_or_else(|| ApiError::field("seed", "`seed` must be a whole number"))?;
                seed as u64
            }
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
            top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0),
            top_k: fields.count("top_k", 0, usize::MAX)?.unwrap_or(0),
            repetition_penalty: fields.number("repetition_penalty", 0.01, 10.0)?.unwrap_or(1.0),
            seed,
        };
        let stops = fields.texts("stop", MOST_STOPS)?;
        fields.finish()?;
        if texts.len() * choices > MOST_CHOICES {
            return Err(ApiError::field("n", format!("a request may ask for up to {MOST_CHOICES} answers")));
        }
        let (mut prompts, mut prompt_tokens) = (Vec::new(), 0);
        for ids in texts {
            let room = self.shape.positions.min(self.shape.cache_rows);
            if ids.is_empty() || ids.len() >= room {
                let what =
                    format!("the prompt has {} tokens, the context holds {room}, answer included", ids.len());
                let param = if endpoint == Endpoint::Chat { "messages" } else { "prompt" };
                return Err(ApiError::field(param, what).with_code("context_length_exceeded"));
            }
            prompt_tokens += ids.len();
            for choice in 0..choices {
                let sampling = Sampling { seed: seed.wrapping_add(choice as u64), ..sampling };
                let max_new = most_new.unwrap_or(usize::MAX).min(room - ids.len());
                let settings = Settings { sampling, max_new, stop_ids: self.stop_ids.clone() };
                prompts.push(Prompt { number: 0, ids: ids.clone(), settings, top });
            }
        }
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        Ok(Asked {
            endpoint,
            model,
            adapter,
            is_streamed,
            includes_usage: options["include_usage"] == true,
            has_probabilities: top.is_some(),
            prompt_tokens,
            prompts,
            stops,
            id: format!("{prefix}-{}-{number}", self.started),
            created: now(),
        })
    }

    /// The tokens of a chat.
    fn chat(&self, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
        let wrong = |what: &str| ApiError::field("messages", what);
        let mut messages = fields.take("messages").ok_or_else(|| wrong("`messages` is missing"))?;
        let list = messages.as_array_mut().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| wrong("`messages` must be a list with at least one message"))?;
        for message in list {
            if !message["role"].is_string() {
                return Err(wrong("every message needs a `role`"));
            }
            join_parts(message)?;
        }
        let tools = fields.take("tools");
        if fields.take("tool_choice").is_some_and(|choice| choice != "auto" && choice != "none") {
            return Err(ApiError::field(
                "tool_choice",
                "`tool_choice` is not supported (supported: auto, none)",
            ));
        }
        let encode = |text: &str, add_special: bool| {
            self.tokenizer.encode(text, add_special).map_err(|error| wrong(&error.to_string()))
        };
        match &self.template {
            Some(TemplateKind::Chat(chat)) => {
                let input = ChatInput {
                    add_generation_prompt: true,
                    tools: tools.as_ref(),
                    ..ChatInput::new(&messages, SystemTime::now())
                };
                let rendered = chat.render(&input).map_err(|error| wrong(&error.to_string()))?;
                encode(&rendered.text, false)
            }
            Some(TemplateKind::Text(text)) => match messages.as_array().map(Vec::as_slice) {
                Some([message]) if message["role"] == "user" => {
                    encode(&text.render(message["content"].as_str().unwrap_or_default(), None), true)
                }
                _ => Err(wrong(
                    "this model was trained on single prompts: send one message of the role `user`",
                )),
            },
            None => Err(wrong("this model has no chat template: use /v1/completions")),
        }
    }

    /// The tokens of each prompt of the older endpoint.
    fn texts(&self, fields: &mut Fields) -> Result<Vec<Vec<u32>>, ApiError> {
        let wrong = |what: &str| ApiError::field("prompt", what);
        let vocabulary = |id: &Value| {
            let id = id
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .filter(|id| self.tokenizer.token(*id).is_some());
            id.ok_or_else(|| wrong("a list of numbers in `prompt` must hold tokens of the model"))
        };
        let encode =
            |text: &str| self.tokenizer.encode(text, true).map_err(|error| wrong(&error.to_string()));
        let prompt = fields.take("prompt").ok_or_else(|| wrong("`prompt` is missing"))?;
        match &prompt {
            Value::String(text) => Ok(vec![encode(text)?]),
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_number) => {
                Ok(vec![items.iter().map(vocabulary).collect::<Result<_, _>>()?])
            }
            Value::Array(items) if !items.is_empty() => {
                let one = |item: &Value| match item {
                    Value::String(text) => encode(text),
                    Value::Array(ids) => ids.iter().map(vocabulary).collect(),
                    _ => Err(wrong("`prompt` must hold texts or lists of tokens")),
                };
                items.iter().map(one).collect()
            }
            _ => Err(wrong("`prompt` must be a text, a list of texts, or tokens")),
        }
    }
}

/// A content of parts becomes one text, which templates expect.
fn join_parts(message: &mut Value) -> Result<(), ApiError> {
    let Value::Array(parts) = &message["content"] else { return Ok(()) };
    let mut text = String::new();
    for part in parts {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(part)) => text += part,
            (kind, _) => {
                let kind = kind.unwrap_or("nothing");
                return Err(ApiError::field(
                    "messages",
                    format!("parts of the type `{kind}` are not supported (supported: text)"),
                ));
            }
        }
    }
    message["content"] = json!(text);
    Ok(())
}

impl Asked {
    /// The work for the engine, an answer each.
    pub fn work(&mut self, replies: &UnboundedSender<(usize, Reply)>) -> Vec<Work> {
        let prompts = std::mem::take(&mut self.prompts).into_iter().enumerate();
        let work = prompts.map(|(choice, prompt)| Work {
            choice,
            adapter: self.adapter,
            prompt,
            stops: self.stops.clone(),
            replies: replies.clone(),
        });
        work.collect()
    }

    fn frame(&self, object: &str, choices: &Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn object(&self, is_piece: bool) -> &'static str {
        match (self.endpoint, is_piece) {
            (Endpoint::Chat, true) => "chat.completion.chunk",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Text, _) => "text_completion",
        }
    }

    pub fn usage(&self, answer_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": self.prompt_tokens + answer_tokens,
        })
    }

    /// The whole answer. `choices` has the text, the tokens and the reason of the end of each.
    pub fn render(
        &self,
        tokenizer: &Tokenizer,
        choices: &[(String, Vec<TokenReply>, &str)],
        answer_tokens: usize,
    ) -> Value {
        let choice = |(index, (text, tokens, reason)): (usize, &(String, Vec<TokenReply>, &str))| {
            let logprobs = self.logprobs(tokenizer, tokens, 0);
            match self.endpoint {
                Endpoint::Chat => json!({
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": null},
                    "logprobs": logprobs,
                    "finish_reason": reason,
                }),
                Endpoint::Text => {
                    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
                }
            }
        };
        let choices: Vec<Value> = choices.iter().enumerate().map(choice).collect();
        let mut answer = self.frame(self.object(false), &json!(choices));
        answer["usage"] = self.usage(answer_tokens);
        answer
    }

    /// The first piece of a chat says who speaks.
    pub fn render_first(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]);
        (self.endpoint == Endpoint::Chat).then(|| self.frame(self.object(true), &choice))
    }

    /// A piece of an answer that begins `offset` characters into the text.
    pub fn render_piece(
        &self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        tokens: &[TokenReply],
        offset: usize,
    ) -> Value {
        let logprobs = self.logprobs(tokenizer, tokens, offset);
        self.frame(
            self.object(true),
            &match self.endpoint {
                Endpoint::Chat => json!([
                    {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null}
                ]),
                Endpoint::Text => {
                    json!([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": null}])
                }
            },
        )
    }

    pub fn render_end(&self, index: usize, reason: &str) -> Value {
        self.frame(
            self.object(true),
            &match self.endpoint {
                Endpoint::Chat => {
                    json!([{"index": index, "delta": {}, "logprobs": null, "finish_reason": reason}])
                }
                Endpoint::Text => {
                    json!([{"index": index, "text": "", "logprobs": null, "finish_reason": reason}])
                }
            },
        )
    }

    /// The last piece, with the number of tokens.
    pub fn render_usage(&self, answer_tokens: usize) -> Option<Value> {
        self.includes_usage.then(|| {
            let mut piece = self.frame(self.object(true), &json!([]));
            piece["usage"] = self.usage(answer_tokens);
            piece
        })
    }

    fn logprobs(&self, tokenizer: &Tokenizer, tokens: &[TokenReply], offset: usize) -> Value {
        if !self.has_probabilities {
            return Value::Null;
        }
        let text = |id: u32| tokenizer.decode(&[id], false).unwrap_or_default();
        match self.endpoint {
            Endpoint::Chat => {
                let entry = |id: u32, probability: f32| {
                    let text = text(id);
                    json!({"token": text, "logprob": probability, "bytes": text.as_bytes()})
                };
                let content = tokens.iter().map(|token| {
                    let mut value = entry(token.id, token.probability);
                    value["top_logprobs"] = token.top.iter().map(|(id, it)| entry(*id, *it)).collect();
                    value
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Endpoint::Text => {
                let texts: Vec<String> = tokens.iter().map(|token| text(token.id)).collect();
                let offsets = texts.iter().scan(offset, |place, text| {
                    let begin = *place;
                    *place += text.chars().count();
                    Some(begin)
                });
                let top = tokens.iter().map(|token| -> Value {
                    let entries = token.top.iter().map(|(id, it)| (text(*id), json!(it)));
                    Value::Object(entries.collect())
                });
                json!({
                    "text_offset": offsets.collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|token| token.probability).collect::<Vec<_>>(),
                    "top_logprobs": top.collect::<Vec<_>>(),
                    "tokens": texts,
                })
            }
        }
    }
}
