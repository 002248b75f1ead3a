//! No `use` path runs in a circle between the rooms of a crate.
//!
//! A room is a file or folder directly under `src/`, or a file inside one folder. The graph has an edge from each room
//! to every room that its paths name: `use` trees, paths in code, `crate::`, `self::`, `super::`, child modules,
//! and names that `lib.rs` or a `mod.rs` re-exports (which count as the room that defines them).
//! `lib.rs`, `main.rs` and a folder's own `mod.rs` are not rooms of that folder. Test code is not read.
//! This is a reader of tokens, not a compiler: names that a macro makes up stay unseen.

use regex::Regex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// The segments of a module's path inside its crate; empty is the crate's root.
type Module = Vec<String>;

/// A path as the code of one module wrote it.
struct Mention {
    from: Module,
    file: String,
    segments: Vec<String>,
}

/// The modules of one crate, test modules left out.
#[derive(Default)]
struct Crate {
    /// What `use` declarations bring into a module: a name and the path it stands for. `*` stands for a glob.
    imports: BTreeMap<Module, Vec<(String, Vec<String>)>>,
    folders: BTreeSet<Module>,
    mentions: Vec<Mention>,
    /// Every identifier of a module, to see what a glob brought in.
    words: BTreeMap<Module, BTreeSet<String>>,
}

/// For each room the rooms it names, each with one example of where.
type Graph = BTreeMap<String, BTreeMap<String, String>>;

// ── tokens ─────────────────────────────────────────────────────────────────────────────────────────

static UNREAD: LazyLock<Regex> = LazyLock::new(|| {
    let comments = r"//[^\n]*|/\*.*?\*/";
    let texts = r##"\br"[^"]*"|\bb?r#".*?"#|"(?:\\.|[^"\\])*"|'(?:\\[^u]|\\u\{\w+\}|[^'\\])'"##;
    Regex::new(&format!("(?s){comments}|{texts}")).unwrap()
});
static TOKEN: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w+|::|\S").unwrap());

/// Identifiers and punctuation, without comments; a text literal is left as an empty one.
fn tokens(text: &str) -> Vec<String> {
    let plain = UNREAD.replace_all(text, " \"\" ");
    TOKEN.find_iter(&plain).map(|found| found.as_str().to_string()).collect()
}

/// Where the item that begins at `start` ends: behind its `;`, or behind its first block.
fn end_of_item(tokens: &[String], start: usize) -> usize {
    let mut depth = 0usize;
    for (index, token) in tokens.iter().enumerate().skip(start) {
        match token.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token == "}" {
                    return index + 1;
                }
            }
            ";" if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Removes every item marked `#[cfg(test)]`, and names those of them that are modules in files of their own.
fn without_tests(tokens: &[String]) -> (Vec<String>, Vec<String>) {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut test_modules) = (Vec::new(), Vec::new());
    let mut index = 0;
    while index < tokens.len() {
        if !tokens[index..].iter().take(mark.len()).eq(mark.iter()) {
            kept.push(tokens[index].clone());
            index += 1;
            continue;
        }
        index += mark.len();
        while tokens.get(index).is_some_and(|token| token == "#") {
            let close = tokens[index..].iter().position(|token| token == "]").expect("an attribute ends");
            index += close + 1;
        }
        let end = end_of_item(tokens, index);
        if let Some(at) = tokens[index..end].iter().position(|token| token == "mod")
            && tokens[end - 1] == ";"
        {
            test_modules.push(tokens[index + at + 1].clone());
        }
        index = end;
    }
    (kept, test_modules)
}

/// The paths of a `use` tree that begins at `tokens[*at]`, each with the name that it binds.
fn use_tree(tokens: &[String], at: &mut usize, before: &[String], paths: &mut Vec<(String, Vec<String>)>) {
    let mut path = before.to_vec();
    loop {
        match tokens[*at].as_str() {
            "{" => {
                *at += 1;
                while tokens[*at] != "}" {
                    use_tree(tokens, at, &path, paths);
                    if tokens[*at] == "," {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            "::" => *at += 1,
            segment => {
                path.push(segment.to_string());
                *at += 1;
                if tokens[*at] != "::" {
                    break;
                }
            }
        }
    }
    // `use a::{self}` binds `a`.
    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    let mut name = path.last().expect("a path has a name").clone();
    if tokens[*at] == "as" {
        name.clone_from(&tokens[*at + 1]);
        *at += 2;
    }
    paths.push((name, path));
}

// ── modules ────────────────────────────────────────────────────────────────────────────────────────

impl Crate {
    fn read(source: &Path) -> Crate {
        let mut found = Crate::default();
        for root in ["lib.rs", "main.rs"].iter().map(|name| source.join(name)).filter(|root| root.exists()) {
            found.read_module(source, &root, &Vec::new());
        }
        found
    }

    /// Reads a file, and the files of the modules that it declares.
    fn read_module(&mut self, source: &Path, file: &Path, module: &Module) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("`{}`: {error}", file.display()));
        let (tokens, test_modules) = without_tests(&tokens(&text));
        let name = file.strip_prefix(source).unwrap().to_string_lossy().into_owned();
        self.read_tokens(&tokens, &name, module);

        let folder = module.iter().fold(source.to_path_buf(), |path, part| path.join(part));
        if !folder.is_dir() {
            return;
        }
        self.folders.insert(module.clone());
        let declared = tokens.windows(3).filter(|three| three[0] == "mod" && three[2] == ";");
        for child in declared.map(|three| &three[1]).filter(|child| !test_modules.contains(child)) {
            let files = [folder.join(format!("{child}.rs")), folder.join(child).join("mod.rs")];
            let file = files.iter().find(|file| file.exists());
            let file = file.unwrap_or_else(|| panic!("no file for `mod {child};` of `{name}`"));
            self.read_module(source, file, &[module.as_slice(), std::slice::from_ref(child)].concat());
        }
    }

    fn read_tokens(&mut self, tokens: &[String], file: &str, module: &Module) {
        self.imports.entry(module.clone()).or_default();
        let identifier = |token: &str| token.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let mut index = 0;
        while index < tokens.len() {
            let token = tokens[index].as_str();
            let next = tokens.get(index + 1).map(String::as_str);
            if token == "mod" && tokens.get(index + 2).is_some_and(|token| token == "{") {
                let end = end_of_item(tokens, index);
                let inner = [module.as_slice(), &[tokens[index + 1].clone()]].concat();
                self.read_tokens(&tokens[index + 3..end - 1], file, &inner);
                index = end;
            } else if token == "use" && next != Some("<") {
                index += 1;
                let mut paths = Vec::new();
                use_tree(tokens, &mut index, &[], &mut paths);
                for (name, path) in paths {
                    self.mention(module, file, path.clone());
                    self.imports.entry(module.clone()).or_default().push((name, path));
                }
            } else if identifier(token) {
                let mut path = vec![token.to_string()];
                index += 1;
                while tokens.get(index).is_some_and(|token| token == "::")
                    && tokens.get(index + 1).is_some_and(|token| identifier(token))
                {
                    path.push(tokens[index + 1].clone());
                    index += 2;
                }
                self.words.entry(module.clone()).or_default().insert(path[0].clone());
                if path.len() > 1 {
                    self.mention(module, file, path);
                }
            } else {
                index += 1;
            }
        }
    }

    fn mention(&mut self, from: &Module, file: &str, segments: Vec<String>) {
        self.mentions.push(Mention { from: from.clone(), file: file.to_string(), segments });
    }

    /// The modules that a path written in `from` leads to: one, several for a glob, none outside this crate.
    fn resolve(
        &self,
        from: &Module,
        segments: &[String],
        through: &mut Vec<(Module, String)>,
    ) -> Vec<Module> {
        let Some((first, rest)) = segments.split_first() else { return vec![from.clone()] };
        match first.as_str() {
            "crate" => return self.resolve_in(&Vec::new(), rest, from, through),
            "self" => return self.resolve_in(from, rest, from, through),
            "super" => {
                let parent = from[..from.len().saturating_sub(1)].to_vec();
                let ups = rest.iter().take_while(|segment| *segment == "super").count();
                let parent = parent[..parent.len().saturating_sub(ups)].to_vec();
                return self.resolve_in(&parent, &rest[ups..], from, through);
            }
            _ => {}
        }
        let child = [from.as_slice(), std::slice::from_ref(first)].concat();
        let imported = self.imports.get(from).into_iter().flatten().any(|(name, _)| name == first);
        if self.imports.contains_key(&child) || imported {
            return self.resolve_in(from, segments, from, through);
        }
        Vec::new()
    }

    /// The modules that a path leads to which begins in `module`; `from` is who asks.
    fn resolve_in(
        &self,
        module: &Module,
        segments: &[String],
        from: &Module,
        through: &mut Vec<(Module, String)>,
    ) -> Vec<Module> {
        let Some((first, rest)) = segments.split_first() else { return vec![module.clone()] };
        if first == "*" {
            return self.resolve_glob(module, from, through);
        }
        let child = [module.as_slice(), std::slice::from_ref(first)].concat();
        if self.imports.contains_key(&child) {
            return self.resolve_in(&child, rest, from, through);
        }
        let step = (module.clone(), first.clone());
        if through.contains(&step) {
            return Vec::new();
        }
        through.push(step);
        let imports = self.imports.get(module).into_iter().flatten();
        for (_, path) in imports.filter(|(name, _)| name == first) {
            let whole: Vec<String> = path.iter().chain(rest).cloned().collect();
            let found = self.resolve(module, &whole, through);
            if !found.is_empty() {
                return found;
            }
        }
        vec![module.clone()]
    }

    /// What `use module::*` brings to `from`: the module itself, and what that module imports and `from` names.
    fn resolve_glob(
        &self,
        module: &Module,
        from: &Module,
        through: &mut Vec<(Module, String)>,
    ) -> Vec<Module> {
        let mut found = vec![module.clone()];
        let words = self.words.get(from);
        for (name, path) in self.imports.get(module).into_iter().flatten() {
            if words.is_some_and(|words| words.contains(name)) && name != "*" {
                found.extend(self.resolve(module, path, through));
            }
        }
        found
    }

    /// Which module names which other, each with one example of where.
    fn edges(&self) -> BTreeMap<(&Module, Module), String> {
        let mut edges = BTreeMap::new();
        for mention in &self.mentions {
            for target in self.resolve(&mention.from, &mention.segments, &mut Vec::new()) {
                let example = || format!("{}: {}", mention.file, mention.segments.join("::"));
                edges.entry((&mention.from, target)).or_insert_with(example);
            }
        }
        edges
    }
}

/// The graph between the rooms of one folder.
fn graph(edges: &BTreeMap<(&Module, Module), String>, folder: &Module) -> Graph {
    let room = |module: &Module| -> Option<String> {
        module.strip_prefix(folder.as_slice()).and_then(|inside| inside.first()).cloned()
    };
    let mut graph = Graph::new();
    for ((from, to), example) in edges {
        if let (Some(from), Some(to)) = (room(from), room(to))
            && from != to
        {
            graph.entry(from).or_default().entry(to).or_insert_with(|| example.clone());
        }
    }
    graph
}

// ── circles ────────────────────────────────────────────────────────────────────────────────────────

/// The shortest way from a room back to itself, as rooms.
fn shortest_circle(graph: &Graph, start: &str) -> Option<Vec<String>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(room) = queue.pop_front() {
        for next in graph.get(room).into_iter().flat_map(|targets| targets.keys()) {
            if next == start {
                let mut circle = vec![start.to_string(), room.to_string()];
                while circle.last().is_some_and(|last| last != start) {
                    circle.push(before[circle.last().unwrap().as_str()].to_string());
                }
                circle.reverse();
                return Some(circle);
            }
            if !before.contains_key(next.as_str()) {
                before.insert(next, room);
                queue.push_back(next);
            }
        }
    }
    None
}

/// The shortest circle of a graph: `a -> b (file: path) -> a (file: path)`.
fn render_circle(graph: &Graph) -> Option<String> {
    let circles = graph.keys().filter_map(|room| shortest_circle(graph, room));
    let circle = circles.min_by_key(Vec::len)?;
    let edges = circle.windows(2).map(|edge| format!(" -> {} ({})", edge[1], graph[&edge[0]][&edge[1]]));
    Some(format!("{}{}", circle[0], edges.collect::<String>()))
}

/// The circles of every folder of a crate's sources.
fn circles(source: &Path, name: &str) -> Vec<String> {
    let read = Crate::read(source);
    let edges = read.edges();
    let folders = read.folders.iter().filter_map(|folder| {
        let place = [&[format!("{name}/src")], folder.as_slice()].concat().join("/");
        render_circle(&graph(&edges, folder)).map(|circle| format!("{place}: {circle}"))
    });
    folders.collect()
}

#[test]
fn no_use_path_runs_in_a_circle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut names: Vec<String> = fs::read_dir(&crates)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let found: Vec<String> =
        names.iter().flat_map(|name| circles(&crates.join(name).join("src"), name)).collect();
    assert!(found.is_empty(), "`use` paths run in circles:\n  {}", found.join("\n  "));
}

/// The circle among files made of `(path, text)`, or nothing.
fn made_circle(files: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    circles(folder.path(), "made")
}

#[test]
fn every_form_of_a_path_closes_a_circle() {
    let lib = "mod a; mod b; pub use b::{Held, deep::Other as Renamed};";
    let a = "use crate::{b::{self, Kept}};";
    for (b, said) in [
        ("use crate::a::Thing;", "crate::a::Thing"),
        ("use super::{a::{Thing, Other}};", "super::a::Thing"),
        ("fn f() { let text = \"}\"; super::a::g(text) }", "super::a::g"),
        ("mod inner { fn f() { super::super::a::g() } }", "super::super::a::g"),
    ] {
        let found = made_circle(&[("lib.rs", lib), ("a.rs", a), ("b.rs", b)]);
        assert_eq!(found, [format!("made/src: a -> b (a.rs: crate::b) -> a (b.rs: {said})")]);
    }
    // What the root re-exports belongs to the room that defines it.
    for a in ["use crate::Held;", "fn f(held: crate::Held) {}", "use super::*; fn f(held: Held) {}"] {
        let found = made_circle(&[("lib.rs", lib), ("a.rs", a), ("b.rs", "use crate::a::Thing;")]);
        assert_eq!(found.len(), 1, "{a}");
    }
    let folder = [
        ("lib.rs", "mod c;"),
        ("c/mod.rs", "mod a; mod b; pub use a::Thing;"),
        ("c/a.rs", "use super::b;"),
        ("c/b.rs", "use crate::c::Thing;"),
    ];
    assert_eq!(
        made_circle(&folder),
        ["made/src/c: a -> b (c/a.rs: super::b) -> a (c/b.rs: crate::c::Thing)"]
    );
}

#[test]
fn tests_and_the_root_close_no_circle() {
    for b in [
        "#[cfg(test)] mod tests { use crate::a::Thing; }",
        "#[cfg(test)] #[path = \"b_tests.rs\"] mod tests;",
        "use crate::rooted; fn f() -> &'static str { \"crate::a::Thing\" } // crate::a::Thing",
    ] {
        let lib = "mod a; mod b; pub fn rooted() { a::f() }";
        let files = [("lib.rs", lib), ("a.rs", "use crate::b::Kept;"), ("b.rs", b)];
        assert_eq!(made_circle(&files), Vec::<String>::new(), "{b}");
    }
}
