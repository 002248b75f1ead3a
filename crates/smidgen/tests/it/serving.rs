//! `smidgen serve`: what clients of OpenAI's interface get, and what broken requests get.

use crate::scratch::{Scratch, fixture};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// A server of the tiny model with two adapters; it ends with the test.
struct Served {
    process: Child,
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Served {
    fn start(scratch: &Scratch, more: &[&str]) -> Served {
        let mut process = Command::new(env!("CARGO_BIN_EXE_smidgen"))
            .args(["serve", "run", "--adapter", "second=other/adapter", "--port", "0", "--device", "cpu"])
            .args(["--threads", "1", "--sequences", "4", "--context", "64", "--json", "--quiet"])
            .args(more)
            .current_dir(scratch.root())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(started["models"], json!(["model", "run", "second"]));
        let address = started["url"].as_str().unwrap().trim_start_matches("http://").to_owned();
        Served { process, address }
    }

    /// The status and the body of an answer.
    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.send("POST", path, "Content-Type: application/json\r\n", &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}")))
    }
}

/// The scratch folder with a tokenizer, and two runs with different adapters.
fn trained() -> Scratch {
    let scratch = Scratch::new();
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let text = std::fs::read_to_string(fixture("sft/byte_level").join(file)).unwrap();
        scratch.write(&format!("model/{file}"), text);
    }
    for more in [&["output.dir=run"][..], &["output.dir=other", "train.seed=8", "train.lr=0.1"]] {
        let ended = scratch.run(&[&["train", "recipe.toml", "--quiet"], more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    scratch
}

/// Tokens of the tiny model's vocabulary.
fn prompt(model: &str) -> Value {
    json!({"model": model, "prompt": [5, 9, 17], "max_tokens": 6, "temperature": 0})
}

#[test]
fn requests_at_once_get_what_each_gets_alone() {
    let scratch = trained();
    let served = Served::start(&scratch, &[]);
    let names = ["model", "run", "second"];
    let text = |name: &str| {
        let (status, answer) = served.post("/v1/completions", &prompt(name));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens"], json!(3));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let alone = names.map(text);
    assert_ne!(alone[0], alone[2], "the adapter changes nothing");
    std::thread::scope(|scope| {
        for number in 0..9 {
            let (text, alone) = (&text, &alone);
            scope.spawn(move || assert_eq!(text(names[number % 3]), alone[number % 3]));
        }
    });
    // In pieces, it is the same text.
    let mut streamed = prompt("run");
    streamed["stream"] = json!(true);
    let kind = "Content-Type: application/json\r\n";
    let (status, body) = served.send("POST", "/v1/completions", kind, &streamed.to_string());
    let events = body.lines().filter_map(|line| line.strip_prefix("data: {"));
    let pieces = events.map(|event| -> Value { serde_json::from_str(&format!("{{{event}")).unwrap() });
    let joined: String =
        pieces.map(|piece| piece["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!((status, joined), (200, alone[1].clone()));
    assert!(body.contains("data: [DONE]"));
    // The chosen token is the most likely one, because the temperature is 0.
    let mut counted = prompt("run");
    counted["logprobs"] = json!(2);
    let (_, answer) = served.post("/v1/completions", &counted);
    let logprobs = &answer["choices"][0]["logprobs"];
    let chosen = logprobs["token_logprobs"][0].as_f64().unwrap();
    let most = logprobs["top_logprobs"][0].as_object().unwrap().values().next().unwrap().as_f64().unwrap();
    assert!(chosen == most && chosen < 0.0, "{logprobs}");
}

#[test]
fn broken_requests_get_openais_errors() {
    let scratch = trained();
    let served = Served::start(&scratch, &[]);
    let with = |key: &str, value: Value| {
        let mut body = prompt("run");
        body[key] = value;
        body
    };
    for (body, status, word) in [
        (with("model", json!("nobody")), 404, "served: model, run, second"),
        (with("model", Value::Null), 400, "`model` is missing"),
        (with("prompt", json!([])), 400, "`prompt`"),
        (with("prompt", json!([99_999])), 400, "tokens of the model"),
        (with("prompt", json!(vec![5; 64])), 400, "the context holds 64"),
        (with("temperature", json!(-1)), 400, "`temperature`"),
        (with("n", json!(0)), 400, "`n`"),
        (with("presence_penalty", json!(1)), 400, "`presence_penalty` is not supported"),
        (with("surprise", json!(1)), 400, "`surprise`"),
    ] {
        let (found, answer) = served.post("/v1/completions", &body);
        let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(found == status && message.contains(word), "{found} {answer}");
    }
    let kind = "Content-Type: application/json\r\n";
    assert_eq!(served.send("POST", "/v1/completions", kind, "{").0, 400);
    assert_eq!(served.send("POST", "/v1/completions", "Content-Type: text/plain\r\n", "{}").0, 415);
    assert_eq!(served.send("GET", "/v1/completions", "", "").0, 405);
    assert_eq!(served.send("GET", "/v2", "", "").0, 404);
    assert_eq!(served.send("GET", "/v1/models/run", "", "").0, 200);
    assert!(served.send("GET", "/", "", "").1.contains("<!doctype html>"));
}

#[test]
fn a_token_is_needed_if_there_is_one_and_for_other_machines() {
    let scratch = trained();
    let served = Served::start(&scratch, &["--token", "secret"]);
    assert_eq!(served.send("GET", "/v1/models", "", "").0, 401);
    assert_eq!(served.send("GET", "/v1/models", "Authorization: Bearer secrets\r\n", "").0, 401);
    assert_eq!(served.send("GET", "/v1/models", "Authorization: Bearer secret\r\n", "").0, 200);
    let ended = scratch.run(&["serve", "run", "--host", "0.0.0.0", "--port", "0"]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("there is no token"), "{}", ended.stderr);
}
