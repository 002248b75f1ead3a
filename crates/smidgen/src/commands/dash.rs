//! `smidgen dash`: a live dashboard of a run, served on localhost.
//!
//! The server listens on the loopback address and has three paths: the page, its content, and the current metrics. The
//! page polls the metrics every two seconds and reloads its content when they have changed. It is read-only, and it
//! runs until it is interrupted.

use crate::console::progress;
use crate::failure::Failure;
use crate::report::html::{render_content, render_live_page};
use crate::report::run_folder::read_run;
use crate::report::run_summary::summarize;
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
    /// Port to serve on (0 = any free port)
    #[arg(long, default_value_t = 7117)]
    port: u16,
}

/// No browser sends a longer request.
const MAX_REQUEST_BYTES: u64 = 16 << 10;
/// A client that sends nothing for this long is dropped.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn run(args: &Args) -> Result<(), Failure> {
    // A wrong folder is reported here, before a browser asks.
    read_run(&args.run)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).map_err(|error| {
        Failure::network(error)
            .context(format!("cannot listen on port {}", args.port))
            .hint("`--port 0` uses any free port")
    })?;
    let address = listener.local_addr().map_err(Failure::network)?;
    progress::say(&format!(
        "serving the run in `{}` at http://{address}/ (Ctrl-C to stop)",
        args.run.display()
    ));
    for stream in listener.incoming().flatten() {
        // A browser that closed the connection is not a failure.
        let _ = answer(stream, &args.run);
    }
    Ok(())
}

fn answer(mut stream: TcpStream, folder: &Path) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = BufReader::new((&stream).take(MAX_REQUEST_BYTES)).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut host = None;
    // The whole request head is read: otherwise the client sees a broken connection.
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("host")
        {
            host = Some(value.trim().to_owned());
        }
    }
    let Response { status, kind, body } = respond(&request, host.as_deref(), folder);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

struct Response {
    status: &'static str,
    kind: &'static str,
    body: String,
}

fn respond(request: &str, host: Option<&str>, folder: &Path) -> Response {
    let plain = |status, words: &str| Response { status, kind: "text/plain", body: format!("{words}\n") };
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    if method != "GET" {
        return plain("405 Method Not Allowed", "only GET");
    }
    // DNS rebinding: a foreign page whose host name resolves to this address gets nothing.
    if !host.is_some_and(is_this_machine) {
        return plain("403 Forbidden", "only localhost is served");
    }
    let path = path.split('?').next().unwrap_or(path);
    if !["/", "/content", "/metrics"].contains(&path) {
        return plain("404 Not Found", "not found");
    }
    let record = match read_run(folder) {
        Ok(record) => record,
        Err(failure) => return plain("500 Internal Server Error", &failure.to_string()),
    };
    match path {
        "/metrics" => {
            let summary = summarize(&record);
            let mut value = summary.render_json();
            let evaluations = record.evaluations.len();
            value["stamp"] = json!(format!("{} {} {evaluations}", summary.standing, summary.steps));
            Response { status: "200 OK", kind: "application/json", body: value.to_string() }
        }
        "/content" => Response { status: "200 OK", kind: "text/html", body: render_content(&record) },
        _ => Response { status: "200 OK", kind: "text/html", body: render_live_page(&record) },
    }
}

fn is_this_machine(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    ["127.0.0.1", "localhost"].contains(&name)
}
