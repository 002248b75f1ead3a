//! `smidgen dash`: the page of a run, live, on this machine alone.
//!
//! A server of four answers on the loopback address: the page, its content, how the run stands, and no to all else. The
//! page asks again every two seconds and fetches the content where something is new. Nothing is kept but what was
//! rendered last, and nothing can be changed through it. It ends with the signal that ends any program.

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
    /// Where the page is served; 0 takes any free port
    #[arg(long, default_value_t = 7117)]
    port: u16,
}

/// Requests that are longer are nobody's browser.
const MAX_REQUEST_BYTES: u64 = 16 << 10;
/// A client that says nothing is not waited for.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn run(args: &Args) -> Result<(), Failure> {
    // What is wrong with the folder is said here, not in a browser.
    read_run(&args.run)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).map_err(|error| {
        Failure::network(error)
            .context(format!("port {} of this machine cannot be used", args.port))
            .hint("`--port 0` takes any free port")
    })?;
    let address = listener.local_addr().map_err(Failure::network)?;
    progress::say(&format!("http://{address}/ shows the run in `{}`; Ctrl-C ends it", args.run.display()));
    for stream in listener.incoming().flatten() {
        // A browser that went away is no failure.
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
    // To the end of the head, or the client hears of a broken connection.
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
    // A page elsewhere whose name was made to lead here does not get the run.
    if !host.is_some_and(is_this_machine) {
        return plain("403 Forbidden", "only by the address of this machine");
    }
    let path = path.split('?').next().unwrap_or(path);
    if !["/", "/content", "/metrics"].contains(&path) {
        return plain("404 Not Found", "there is no such page");
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
