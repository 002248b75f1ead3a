//! `smidgen dash`: a live dashboard of a run, served on localhost.
//!
//! The server listens on the loopback address and has three paths: the page, its content, and the current metrics. The
//! page polls the metrics every two seconds and reloads its content when they have changed. The server is read-only and
//! runs until it is interrupted.
//! Every client has its own task and a time limit, so a slow client does not block the others.

use crate::console::progress;
use crate::failure::Failure;
use crate::report::html::{render_content, render_live_page};
use crate::report::run_folder::read_run;
use crate::report::run_summary::summarize;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use std::convert::Infallible;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
    /// Port to serve on (0 = any free port)
    #[arg(long, default_value_t = 7117)]
    port: u16,
}

/// Browsers send shorter requests.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// The head of a request has to arrive within this time.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);
/// The client has to read the whole answer within this time.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Clients that are served at the same time; more have to wait.
const MOST_CLIENTS: usize = 256;
/// Threads that read the run folder and render pages.
const MOST_READERS: usize = 4;

pub fn run(args: &Args) -> Result<(), Failure> {
    // Reports a wrong folder at once, not when a browser asks.
    read_run(&args.run)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).map_err(|error| {
        Failure::network(error)
            .context(format!("cannot listen on port {}", args.port))
            .hint("`--port 0` uses any free port")
    })?;
    let address = listener.local_addr().map_err(Failure::network)?;
    listener.set_nonblocking(true).map_err(Failure::network)?;
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(MOST_READERS)
        .build()
        .map_err(Failure::network)?;
    progress::say(&format!(
        "serving the run in `{}` at http://{address}/ (Ctrl-C to stop)",
        args.run.display()
    ));
    runtime.block_on(serve(listener, Arc::from(args.run.as_path()))).map_err(Failure::network)
}

async fn serve(listener: TcpListener, folder: Arc<Path>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(MOST_CLIENTS));
    loop {
        let permit = Arc::clone(&free).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            // Too many open files, or a client that disconnected.
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let answered = timeout(ANSWER_WITHIN, answer(stream, Arc::clone(&folder)));
        tokio::spawn(async move {
            // A browser that closed the connection is not a failure.
            let _ = answered.await;
            drop(permit);
        });
    }
}

/// Answers one request and closes the connection.
async fn answer(stream: TcpStream, folder: Arc<Path>) -> Result<(), hyper::Error> {
    let service =
        service_fn(move |request: Request<Incoming>| {
            let folder = Arc::clone(&folder);
            async move {
                let answer = spawn_blocking(move || respond(&request, &folder)).await;
                Ok::<_, Infallible>(answer.unwrap_or_else(|_| {
                    plain(StatusCode::INTERNAL_SERVER_ERROR, "the page cannot be rendered")
                }))
            }
        });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WITHIN)
        .max_buf_size(MAX_REQUEST_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

fn respond(request: &Request<Incoming>, folder: &Path) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET");
    }
    // Against DNS rebinding: a foreign host name that resolves to this address is refused.
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if !host.is_some_and(is_this_machine) {
        return plain(StatusCode::FORBIDDEN, "only localhost is served");
    }
    let path = request.uri().path();
    if !["/", "/content", "/metrics"].contains(&path) {
        return plain(StatusCode::NOT_FOUND, "not found");
    }
    let record = match read_run(folder) {
        Ok(record) => record,
        Err(failure) => return plain(StatusCode::INTERNAL_SERVER_ERROR, &failure.to_string()),
    };
    match path {
        "/metrics" => {
            let summary = summarize(&record);
            let mut value = json!(summary);
            let evaluations = record.evaluations.len();
            value["stamp"] = json!(format!("{} {} {evaluations}", summary.state, summary.steps));
            page(StatusCode::OK, "application/json", value.to_string())
        }
        "/content" => page(StatusCode::OK, "text/html", render_content(&record)),
        _ => page(StatusCode::OK, "text/html", render_live_page(&record)),
    }
}

fn plain(status: StatusCode, words: &str) -> Response<Full<Bytes>> {
    page(status, "text/plain", format!("{words}\n"))
}

fn page(status: StatusCode, kind: &str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_str(&format!("{kind}; charset=utf-8"));
    let headers = response.headers_mut();
    headers.extend(kind.ok().map(|kind| (header::CONTENT_TYPE, kind)));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    response
}

fn is_this_machine(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    ["127.0.0.1", "localhost"].contains(&name)
}
