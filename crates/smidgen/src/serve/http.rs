//! Connections of the server: paths, the token, limits, and answers that are sent while they are generated.
//!
//! Every client has its own task, and answers wait in a queue for their reader, so a slow client delays nobody. Only the
//! engine's thread touches the model.
//! Requests from pages of other sites are refused: they cannot send JSON without asking first, and nothing allows it.

use super::engine::{Reply, TokenReply, Work};
use super::fields::ApiError;
use super::openai::{Asked, Endpoint, Served};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{sleep, timeout};

/// A body longer than this has more tokens than any context.
const MAX_BODY_BYTES: usize = 16 << 20;
const MAX_HEAD_BYTES: usize = 32 << 10;
/// The head of a request has to arrive within this time, and its body.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// A connection is closed after this time, also if its client reads slowly.
const CONNECTION_WITHIN: Duration = Duration::from_secs(1800);
/// Clients at the same time; more have to wait. Below the usual limit of 1,024 open files.
const MOST_CLIENTS: usize = 900;
/// Answers that are generated or waiting; more are refused.
const MOST_ANSWERS: usize = 1024;

const PAGE: &str = include_str!("page.html");

/// What all connections share.
pub struct Server {
    pub served: Served,
    pub queue: Sender<Work>,
    /// Requests have to send it, if there is one.
    pub token: Option<String>,
    /// Only names of this machine are accepted as the host, against DNS rebinding.
    pub is_local: bool,
    /// Answers that are generated or waiting.
    pub answers: Arc<AtomicUsize>,
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// Serves until the process ends.
pub async fn serve(listener: std::net::TcpListener, server: Arc<Server>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(MOST_CLIENTS));
    loop {
        let permit = Arc::clone(&free).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            // Too many open files, or a client that disconnected.
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let answered = timeout(CONNECTION_WITHIN, answer(stream, Arc::clone(&server)));
        tokio::spawn(async move {
            // A client that closed the connection is not a failure.
            let _ = answered.await;
            drop(permit);
        });
    }
}

async fn answer(stream: TcpStream, server: Arc<Server>) -> Result<(), hyper::Error> {
    let service = service_fn(move |request: Request<Incoming>| {
        let server = Arc::clone(&server);
        async move {
            let answer = respond(request, &server).await;
            Ok::<_, Infallible>(answer.unwrap_or_else(|error| json_answer(error.status, &error.render())))
        }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WITHIN)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn respond(request: Request<Incoming>, server: &Arc<Server>) -> Result<Answer, ApiError> {
    check_host(&request, server)?;
    let path = request.uri().path().to_owned();
    let endpoint = match path.as_str() {
        "/" => None,
        "/v1/chat/completions" => Some(Endpoint::Chat),
        "/v1/completions" => Some(Endpoint::Text),
        path if path == "/v1/models" || path.starts_with("/v1/models/") => None,
        path => {
            let known = "/v1/chat/completions, /v1/completions, /v1/models";
            return Err(ApiError::new(
                StatusCode::NOT_FOUND,
                format!("`{path}` is not served here ({known} are)"),
            ));
        }
    };
    let method = if endpoint.is_some() { Method::POST } else { Method::GET };
    if request.method() != method {
        let message = format!("`{path}` takes {method} requests");
        return Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message));
    }
    if path == "/" {
        return Ok(whole(StatusCode::OK, "text/html", PAGE.to_owned()));
    }
    check_token(&request, server)?;
    let Some(endpoint) = endpoint else {
        let name = path.strip_prefix("/v1/models/");
        let body = match name {
            None => server.served.render_models(),
            Some(name) => server.served.find(name).map(|_| server.served.render_model(name))?,
        };
        return Ok(json_answer(StatusCode::OK, &body));
    };
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let media_type = kind.and_then(|kind| kind.split(';').next()).map(str::trim);
    if media_type != Some("application/json") {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(ApiError::new(status, "the `Content-Type` must be `application/json`"));
    }
    let body = read_body(request).await?;
    // Tokenizing a long prompt takes a while.
    let reader = Arc::clone(server);
    let asked = tokio::task::spawn_blocking(move || reader.served.read(endpoint, &body)).await;
    let mut asked = asked
        .map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be read"))??;
    let taken = Taken::of(&server.answers, asked.prompts.len())?;
    let (replies, answers) = unbounded_channel();
    let work = asked.work(&replies);
    let choices = work.len();
    for work in work {
        let gone = |_| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the model is no longer loaded");
        server.queue.send(work).map_err(gone)?;
    }
    // The engine has the only senders left, so the channel closes if it drops the work.
    drop(replies);
    let running = Running { asked, server: Arc::clone(server), answers, choices, _taken: taken };
    if running.asked.is_streamed { Ok(running.stream()) } else { running.whole().await }
}

fn check_host(request: &Request<Incoming>, server: &Server) -> Result<(), ApiError> {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let name = host.map(|host| host.rsplit_once(':').map_or(host, |(name, _)| name));
    if !server.is_local || name.is_some_and(|name| ["127.0.0.1", "localhost", "[::1]"].contains(&name)) {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::FORBIDDEN, "only localhost is served; `--host` and `--token` serve others"))
}

fn check_token(request: &Request<Incoming>, server: &Server) -> Result<(), ApiError> {
    let Some(token) = &server.token else { return Ok(()) };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer "));
    // Every byte is compared, so the time says nothing about the token.
    let is_same = given.is_some_and(|given| {
        let pairs = given.bytes().zip(token.bytes());
        given.len() == token.len() && pairs.fold(0, |sum, (one, other)| sum | (one ^ other)) == 0
    });
    if is_same {
        return Ok(());
    }
    let message = "a request needs the header `Authorization: Bearer TOKEN` with the token of the server";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key"))
}

async fn read_body(request: Request<Incoming>) -> Result<Bytes, ApiError> {
    let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
    match timeout(BODY_WITHIN, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the body has more than {MAX_BODY_BYTES} bytes");
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(_)) => Err(ApiError::new(StatusCode::BAD_REQUEST, "the body ended too early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// Places among the answers that are generated or waiting; freed on drop.
struct Taken {
    answers: Arc<AtomicUsize>,
    count: usize,
}

impl Taken {
    fn of(answers: &Arc<AtomicUsize>, count: usize) -> Result<Taken, ApiError> {
        let before = answers.fetch_add(count, Ordering::Relaxed);
        let taken = Taken { answers: Arc::clone(answers), count };
        if before + count > MOST_ANSWERS {
            let message = format!("{before} answers are waiting: ask again later");
            return Err(
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded")
            );
        }
        Ok(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.answers.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// A request whose answers are being generated.
struct Running {
    asked: Asked,
    server: Arc<Server>,
    answers: UnboundedReceiver<(usize, Reply)>,
    choices: usize,
    _taken: Taken,
}

const LOST: &str = "the generation ended without an answer";

impl Running {
    async fn whole(mut self) -> Result<Answer, ApiError> {
        let mut choices: Vec<(String, Vec<TokenReply>, &str)> =
            vec![(String::new(), vec![], ""); self.choices];
        let (mut ended, mut all_tokens) = (0, 0);
        while ended < self.choices {
            let failed = |message: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message);
            match self.answers.recv().await {
                Some((choice, Reply::Piece { text, tokens })) => {
                    choices[choice].0 += &text;
                    choices[choice].1.extend(tokens);
                }
                Some((choice, Reply::End { reason, answer_tokens })) => {
                    choices[choice].2 = reason;
                    all_tokens += answer_tokens;
                    ended += 1;
                }
                Some((_, Reply::Failed(message))) => return Err(failed(message)),
                None => return Err(failed(LOST.to_owned())),
            }
        }
        let body = self.asked.render(&self.server.served.tokenizer, &choices, all_tokens);
        Ok(json_answer(StatusCode::OK, &body))
    }

    fn stream(self) -> Answer {
        let first = (0..self.choices).filter_map(|choice| self.asked.render_first(choice));
        let waiting: VecDeque<String> = first.map(|piece| event(&piece)).collect();
        let offsets = vec![0; self.choices];
        let events = Events { running: self, waiting, offsets, ended: 0, all_tokens: 0, is_over: false };
        let mut answer = Response::new(events.boxed());
        set_headers(&mut answer, "text/event-stream");
        answer
    }
}

/// One event of a stream.
fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// The body of an answer that is sent while it is generated.
struct Events {
    running: Running,
    waiting: VecDeque<String>,
    /// Characters that were sent of each answer.
    offsets: Vec<usize>,
    ended: usize,
    all_tokens: usize,
    is_over: bool,
}

impl Events {
    fn take(&mut self, reply: Option<(usize, Reply)>) {
        let asked = &self.running.asked;
        let tokenizer = &self.running.server.served.tokenizer;
        match reply {
            Some((choice, Reply::Piece { text, tokens })) => {
                let piece = asked.render_piece(tokenizer, choice, &text, &tokens, self.offsets[choice]);
                self.offsets[choice] += text.chars().count();
                self.waiting.push_back(event(&piece));
            }
            Some((choice, Reply::End { reason, answer_tokens })) => {
                self.waiting.push_back(event(&asked.render_end(choice, reason)));
                (self.ended, self.all_tokens) = (self.ended + 1, self.all_tokens + answer_tokens);
                if self.ended == self.running.choices {
                    self.waiting.extend(asked.render_usage(self.all_tokens).iter().map(event));
                    self.waiting.push_back("data: [DONE]\n\n".to_owned());
                    self.is_over = true;
                }
            }
            Some((_, Reply::Failed(message))) => self.fail(&message),
            None => self.fail(LOST),
        }
    }

    fn fail(&mut self, message: &str) {
        let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message);
        self.waiting.push_back(event(&error.render()));
        self.is_over = true;
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let it = self.get_mut();
        loop {
            if let Some(text) = it.waiting.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))));
            }
            if it.is_over {
                return Poll::Ready(None);
            }
            match it.running.answers.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(reply) => it.take(reply),
            }
        }
    }
}

fn json_answer(status: StatusCode, body: &Value) -> Answer {
    whole(status, "application/json", format!("{body}\n"))
}

fn whole(status: StatusCode, kind: &str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)).boxed());
    *answer.status_mut() = status;
    set_headers(&mut answer, kind);
    answer
}

fn set_headers(answer: &mut Answer, kind: &str) {
    let kind = header::HeaderValue::from_str(&format!("{kind}; charset=utf-8"));
    let headers = answer.headers_mut();
    headers.extend(kind.ok().map(|kind| (header::CONTENT_TYPE, kind)));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
}

/// The line that a program reads which starts the server.
pub fn render_start(address: &str, served: &Served, planned_bytes: u64) -> Value {
    let models: Vec<&str> = served.models.iter().map(|(name, _)| name.as_str()).collect();
    let shape = served.shape;
    json!({
        "url": format!("http://{address}"),
        "models": models,
        "has_template": served.template.is_some(),
        "sequences": shape.slots,
        "context": shape.positions,
        "cache_tokens": shape.cache_rows,
        "planned_bytes": planned_bytes,
    })
}
