//! A server with OpenAI's interface: many requests share one model, and adapters share its base.
//!
//! `http.rs` has connections and paths, `openai.rs` and `fields.rs` the form of requests and answers, `engine.rs` the thread
//! that generates, `page.html` a page to talk to the models.

pub mod engine;
pub mod fields;
pub mod http;
pub mod openai;
