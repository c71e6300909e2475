//! The engine's top-level modules form no cycle, so that each can be read knowing only the modules below it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each top-level module with the modules that its code uses, without tests.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let root = fs::read_to_string(src.join("lib.rs")).unwrap();
    let modules: BTreeSet<String> = root
        .lines()
        .filter_map(|line| line.strip_suffix(';')?.split("mod ").nth(1))
        .map(String::from)
        .collect();
    let reexported = reexported(&root, &modules);
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for module in &modules {
        let mut files = Vec::new();
        collect(&src.join(module), &mut files);
        files.extend([src.join(module).with_extension("rs")].into_iter().filter(|file| file.exists()));
        assert!(!files.is_empty(), "module {module} has no file");
        let names = files.iter().flat_map(|file| root_names(&code(file)));
        let targets = names.filter_map(|name| match modules.contains(&name) {
            true => Some(name),
            false => reexported.get(&name).cloned(),
        });
        found.insert(module.clone(), targets.filter(|target| target != module).collect());
    }
    found
}

/// The names that the crate's root re-exports, with their modules.
fn reexported(root: &str, modules: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for statement in root.split("pub use ").skip(1) {
        let statement = &statement[..statement.find(';').unwrap()];
        let module = statement.split("::").next().unwrap();
        assert!(modules.contains(module), "{module} is no module of the engine");
        for name in words(statement) {
            names.insert(name.to_owned(), module.to_owned());
        }
    }
    names
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            collect(&path, files);
        } else if path.file_name().is_some_and(|name| name != "tests.rs") {
            files.push(path);
        }
    }
}

/// The source of a file without comments and tests.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The names after `crate::`, alone or in braces.
fn root_names(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.extend(words(rest).next().map(String::from));
            continue;
        };
        let mut depth = 0;
        let mut part = String::new();
        for c in list.chars() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => names.extend(words(&std::mem::take(&mut part)).next().map(String::from)),
                _ => part.push(c),
            }
        }
        names.extend(words(&part).next().map(String::from));
    }
    names
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// A cycle of modules that depend on each other, if there is one.
fn cycle(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit(
        graph: &BTreeMap<String, BTreeSet<String>>,
        module: &str,
        way: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(start) = way.iter().position(|m| m == module) {
            return Some(way[start..].iter().cloned().chain([module.to_owned()]).collect());
        }
        if !done.insert(module.to_owned()) {
            return None;
        }
        way.push(module.to_owned());
        let found = graph[module].iter().find_map(|next| visit(graph, next, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn top_level_modules_form_no_cycle() {
    let graph = dependencies();
    assert!(graph["session"].contains("engine") && graph["engine"].contains("memory"), "{graph:?}");
    if let Some(way) = cycle(&graph) {
        panic!("these modules depend on each other: {}", way.join(" -> "));
    }
}

#[test]
fn a_cycle_is_found() {
    let graph = |edges: &[(&str, &[&str])]| -> BTreeMap<String, BTreeSet<String>> {
        edges
            .iter()
            .map(|(from, to)| (from.to_string(), to.iter().map(|to| to.to_string()).collect()))
            .collect()
    };
    assert_eq!(cycle(&graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
    let way = cycle(&graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["d", "b"]), ("d", &[])]));
    assert_eq!(way, Some(["b", "c", "b"].map(String::from).to_vec()));
    assert_eq!(
        root_names("use crate::{TokenId, backend::{Buf, rank}, plan};\ncrate::error::Error"),
        ["TokenId", "backend", "plan", "error"]
    );
}
