//! Malicious chat templates: each must end in an error before it uses up memory or time.
//!
//! Templates like those of published models must still render.

use crate::mutation::peak_bytes_of;
use serde_json::{Map, Value as Json, json};
use smidgen_formats::tokenizer::chat_template::{ChatInput, ChatTemplate, ChatTemplateError};
use std::time::SystemTime;

const MOST_BYTES: usize = 200 << 20;

fn messages() -> Json {
    json!([{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}])
}

fn render(source: &str) -> Result<String, String> {
    let template = ChatTemplate::new(source, Map::new()).map_err(|error| error.to_string())?;
    let messages = messages();
    let rendered = template.render(&ChatInput::new(&messages, SystemTime::UNIX_EPOCH));
    rendered.map(|rendered| rendered.text).map_err(|error| error.to_string())
}

/// Renders a template that must fail with bounded memory, and returns the error.
fn refused(source: &str) -> String {
    let (rendered, peak_bytes) = peak_bytes_of(|| render(source));
    let shown: String = source.chars().take(120).collect();
    assert!(peak_bytes < MOST_BYTES, "{shown}: {peak_bytes} bytes");
    match rendered {
        Ok(text) => panic!("{shown}: rendered {} bytes", text.len()),
        Err(error) => {
            assert!(error.len() < 2000, "{shown}: a message of {} bytes", error.len());
            error
        }
    }
}

#[test]
fn very_long_loops() {
    for source in [
        "{% for i in range(999999999) %}a{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}long{% endfor %}{% endfor %}{% endset %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ] {
        refused(source);
    }
}

#[test]
fn texts_that_grow() {
    let grow = |step: &str| {
        format!("{{% set ns = namespace(x='aaaaaaaa') %}}{{% for i in range(64) %}}{step}{{% endfor %}}")
    };
    for source in [
        "{{ 'a' * 10**10 }}".to_owned(),
        "{{ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) }}".to_owned(),
        "{% set x = [1, 2] * 50000000 %}{{ x | length }}{% set y = (1, 2) * 50000000 %}".to_owned(),
        grow("{% set ns.x = ns.x ~ ns.x %}"),
        grow("{% set ns.x = ns.x + ns.x %}"),
        grow("{% set ns.x = ns.x * 2 %}"),
        grow("{% set ns.x = ns.x | replace('a', 'aaaa') %}"),
        grow("{% set ns.x = ns.x.replace('a', 'aaaa') %}"),
        grow("{% set ns.x = [ns.x, ns.x, ns.x] | join('') %}"),
        grow("{% set ns.x = ns.x | list | join(ns.x) %}"),
        grow("{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}"),
        grow("{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
        grow("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
        grow("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        format!("{}{{{{ ns.x | length }}}}", grow("{% set ns.x = [ns.x, ns.x] | tojson %}")),
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}".to_owned()
            + &format!("{{{{ {}'aaaa'{} }}}}", "d(".repeat(40), ")".repeat(40)),
        "{{ 'a' | indent(1000000000, true) }}".to_owned(),
        "{{ 'a' | indent(width=1000000000, first=true) }}".to_owned(),
        "{{ ['a'] | map('indent', 1000000000, true) | list }}".to_owned(),
        "{{ [1] | tojson(indent=1000000000) }}".to_owned(),
        "{{ '%999999999d' | format(1) }}".to_owned(),
        "{{ '{:>999999999}'.format(1) }}".to_owned(),
        "{{ '{:>{}}'.format(1, 999999999) }}".to_owned(),
        "{{ [1] | batch(999999999, 'x') | list }}".to_owned(),
        "{{ [1] | slice(999999999, 'x') | list }}".to_owned(),
        "{% set big = 'a' * 50000000 %}{% for i in range(1000) %}{{ big | upper | length }}{% endfor %}"
            .to_owned(),
        "{% set big = 'a' * 50000000 %}{{ big | list | length }}".to_owned(),
    ] {
        refused(&source);
    }
}

#[test]
fn lists_that_grow_or_contain_themselves() {
    let grow = |times: usize, step: &str| {
        format!("{{% set ns = namespace(x=[1]) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}")
    };
    for source in [
        grow(99999, "{% set ns.x = [ns.x] %}"),
        grow(99999, "{% set ns.x = {'a': ns.x} %}"),
        grow(99999, "{% set ns.x = dict(a=ns.x) %}"),
        grow(99999, "{% set d = dict %}{% set ns.x = d(a=ns.x) %}"),
        grow(99999, "{% set ns.x = namespace(x=ns.x) %}"),
        grow(64, "{% set ns.x = ns.x + ns.x %}"),
        grow(64, "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
        grow(99999, "{% set ns.x = ns.x + [messages, messages, messages] %}"),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns | tojson }}".to_owned(),
        "{% set ns = namespace(t=none) %}{% set a = namespace() %}{% set a.next = namespace() %}".to_owned(),
    ] {
        refused(&source);
    }
}

/// Comparisons that take long although they are few instructions.
#[test]
fn very_long_comparisons() {
    let big = "{% set big = 'a' * 20000000 %}{% set other = 'a' * 20000000 %}";
    for step in [
        "big == other",
        "'b' in big",
        "big < other",
        "big is eq other",
        "big.find('b') > 0",
        "big | length == 3",
    ] {
        refused(&format!("{big}{{% for i in range(99999) %}}{{% if {step} %}}a{{% endif %}}{{% endfor %}}"));
    }
}

#[test]
fn sources_that_are_nested() {
    let many = 50_000;
    for source in [
        format!("{{{{ {}1{} }}}}", "(".repeat(many), ")".repeat(many)),
        format!("{{{{ {}1{} }}}}", "[".repeat(many), "]".repeat(many)),
        format!("{{{{ {}1 }}}}", "not ".repeat(many)),
        format!("{{{{ {}1 }}}}", "-".repeat(many)),
        format!("{{{{ 1{} }}}}", " + 1".repeat(many)),
        format!("{{{{ a{} }}}}", " ~ a".repeat(many)),
        format!("{{{{ a{} }}}}", ".a".repeat(many)),
        format!("{{{{ a{} }}}}", "[0]".repeat(many)),
        format!("{{{{ a{} }}}}", " | trim".repeat(many)),
        format!("{{{{ a{} }}}}", " if a else a".repeat(many)),
        "{% if a %}".repeat(many),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(many)),
        "{% for a in b %}".repeat(many),
        "a".repeat(2_000_000),
    ] {
        refused(&source);
    }
}

/// What a template does beyond what its rows explain is counted over all rows, not for each.
#[test]
fn work_is_bounded_over_all_rows() {
    for source in [
        "{% for i in range(90000) %}{% set x = i + 1 %}{% endfor %}{{ raise_exception('no') }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set big = 'a' * 9000000 %}{% for i in range(5) %}{{ big | upper | length }}{% endfor %}",
    ] {
        let template = ChatTemplate::new(source, Map::new()).unwrap();
        let messages = messages();
        let render = || template.render(&ChatInput::new(&messages, SystemTime::UNIX_EPOCH));
        let rows = (0..200).find(|_| matches!(render(), Err(ChatTemplateError::TooMuchWork)));
        assert!(rows.is_some_and(|rows| rows > 5), "{source}: {rows:?}");
        assert_eq!(
            render().unwrap_err().to_string(),
            "the chat template does far more work than its rows need and may be malicious"
        );
    }
    let usual = "{% for m in messages %}{{ m.role ~ m.content | trim }}{% endfor %}";
    let template = ChatTemplate::new(usual, Map::new()).unwrap();
    for _ in 0..20_000 {
        template.render(&ChatInput::new(&messages(), SystemTime::UNIX_EPOCH)).unwrap();
    }
}

#[test]
fn the_length_of_a_text_follows_from_its_input() {
    let template = ChatTemplate::new("{{ 'a' * 70000 }}", Map::new()).unwrap();
    let messages = messages();
    let with = |most_text_bytes| {
        let input = ChatInput { most_text_bytes, ..ChatInput::new(&messages, SystemTime::UNIX_EPOCH) };
        template.render(&input).map(|rendered| rendered.text.len()).map_err(|error| error.to_string())
    };
    assert_eq!(with(70_000), Ok(70_000));
    let error = with(60_000).unwrap_err();
    assert!(error.starts_with("the chat template makes 70000 bytes of text of a row of "), "{error}");
}

#[test]
fn features_of_published_templates_are_allowed() {
    for (source, expected) in [
        (
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=user;content=Hello there;",
        ),
        (
            "{% set ns = namespace(n=0, parts=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.parts = ns.parts + [m.content] %}{% endfor %}{{ ns.n }} {{ ns.parts | join(', ') }}",
            "2 Hello there, Hi",
        ),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | first }}",
            "Hello there",
        ),
        (
            "{% macro shout(text, times=2) %}{{ text.upper() * times }}{% endmacro %}{{ shout('a') }}{{ shout('b', times=1) }}",
            "AAB",
        ),
        ("{{ '-' * 20 }}{{ 'a' ~ 1 ~ [2] }}{{ 3 * 4 + 10 % 3 }}", "--------------------a1[2]13"),
        (
            "{{ messages[::-1][0].content }}{{ messages[0].content[:5] }}{{ missing | default('x') }}",
            "HiHellox",
        ),
        (
            "{% if messages[0].tools is defined and messages[0].tools is not none %}a{% elif missing is undefined %}b{% endif %}",
            "b",
        ),
        (
            "{% set text %}x{{ messages | length }}{% endset %}{{ text | replace('x', 'yy') }}{{ {'a': [1, none]} | tojson }}",
            "yy2{\"a\": [1, null]}",
        ),
        (
            "{{ dict(a=1).a }}{% call(x) each() %}{% endcall %}{% macro each() %}{{ caller(1) }}{% endmacro %}",
            "",
        ),
        (
            "{{ 'x' if messages[0].role in ['user', 'tool'] else 'y' }}{{ 'ell' in messages[0].content }}{{ '{:>4}'.format(1) }}",
            "xTrue   1",
        ),
        (
            "{% filter upper %}a{{ 'b' | trim }}{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}{{ 'a,b'.split(',')[1] }}",
            "AB1b",
        ),
    ] {
        let rendered = render(source);
        if !expected.is_empty() {
            assert_eq!(rendered.as_deref(), Ok(expected), "{source}");
        }
    }
}

#[test]
fn long_conversations_are_allowed() {
    let source = "{% set ns = namespace(last='') %}{% for message in messages %}\
        {% if message['role'] == 'user' and message['content'] is string %}{{ '<|user|>' + message['content'] | trim }}\
        {% elif message.role == 'assistant' %}{% set ns.last = message.content %}{{ '<|assistant|>' ~ ns.last }}\
        {% endif %}{% endfor %}";
    let text = "word ".repeat(200);
    let messages: Vec<Json> = (0..2000)
        .map(|index| json!({"role": if index % 2 == 0 { "user" } else { "assistant" }, "content": text}))
        .collect();
    let template = ChatTemplate::new(source, Map::new()).unwrap();
    let messages = Json::from(messages);
    let rendered = template.render(&ChatInput::new(&messages, SystemTime::UNIX_EPOCH)).unwrap();
    assert!(rendered.text.len() > 2_000_000);
}
