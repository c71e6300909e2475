//! The README, the other pages at the root and the book in docs/: links lead somewhere, every page is in the table of
//! contents, and commands have the flags of today.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::common::{call, repository};

#[test]
fn links_lead_somewhere() {
    let root = repository("");
    assert_none(broken_links(&root, &pages(&root)));
}

#[test]
fn every_page_is_in_the_table_of_contents() {
    assert_none(unlisted(&pages(&repository(""))));
}

#[test]
fn commands_have_the_flags_of_today() {
    let wrong = pages(&repository("")).into_iter().flat_map(|(name, page)| {
        page.commands.into_iter().filter_map(move |c| Some(format!("{name}: {}: {}", c.text, c.refusal()?)))
    });
    assert_none(wrong.collect());
}

#[test]
fn flags_that_the_book_names_exist() {
    let of_clap = ["--help", "--version"];
    let of_others = [
        "--env-file",
        "--features",
        "--fit",
        "--lora",
        "--mlock",
        "--mmproj",
        "--n-cpu-moe",
        "--n-gpu-layers",
        "--no-mmap",
        "--release",
    ];
    let known = call(&["docs", "markdown"]).success();
    let known: BTreeSet<&str> = flags(&known).chain(of_clap).chain(of_others).collect();
    let pages = pages(&repository(""));
    let concerned = pages.iter().filter(|(name, _)| in_book(name) || *name == "README.md");
    let wrong = concerned.flat_map(|(name, page)| {
        // What begins otherwise is a command of another program.
        let codes = page.codes.iter().filter(|code| code.starts_with('-') || code.starts_with("forebay"));
        let unknown = codes.flat_map(|code| flags(code)).filter(|flag| !known.contains(flag));
        unknown.map(move |flag| format!("{name}: there is no {flag}"))
    });
    assert_none(wrong.collect());
}

/// People search the book for what the program has told them.
#[test]
fn messages_that_the_book_explains_are_the_programs() {
    let root = repository("");
    let is_shipped = |name: &String| name.contains("/src/") && !name.contains("/tests");
    let sources = files(&root, "crates", ".rs").into_iter().filter(is_shipped);
    let sources: Vec<String> = sources.map(|name| one_line(&read(&root.join(name)))).collect();
    let told = |part: &str| sources.iter().any(|source| source.contains(part));
    let page = read(&root.join("docs/troubleshooting.md"));
    let unknown =
        explained(&page).into_iter().filter(|message| !message.split('…').all(|part| told(part.trim())));
    assert_none(unknown.map(|message| format!("the program never says {message:?}")).collect());
}

/// `../shared` lies beside the checkout on our machines alone.
#[test]
fn the_book_names_only_what_readers_have() {
    let root = repository("");
    let named =
        files(&root, "docs", ".md").into_iter().filter(|name| read(&root.join(name)).contains("../shared"));
    assert_none(named.map(|name| format!("{name} names ../shared")).collect());
}

#[test]
fn what_is_broken_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    std::fs::create_dir(root.join("docs")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(root.join(name), text).unwrap();
    write("docs/SUMMARY.md", "# Summary\n\n- [One](one.md)\n");
    write("docs/one.md", "# One\n\n## A `--flag`, and more\n\n[](two.md#b-1) [](#a---flag-and-more)\n");
    write("docs/two.md", "## B\n\n## B\n\n[](one.md#two) [](../README.md) ![](none.png)\n");
    write(
        "README.md",
        "[](docs/one.md) <img src=\"none.svg\">\n\n```sh\nX=1 forebay run --none | cat\n```\n",
    );
    let pages = pages(root);
    let broken = [
        "README.md: none.svg: there is no such file",
        "docs/two.md: one.md#two: there is no such heading",
        "docs/two.md: ../README.md: this is outside of the book",
        "docs/two.md: none.png: there is no such file",
    ];
    assert_eq!(broken_links(root, &pages), broken);
    assert_eq!(unlisted(&pages), ["docs/two.md is not in docs/SUMMARY.md"]);
    let [command] = &pages["README.md"].commands[..] else { panic!("one command is expected") };
    assert_eq!(command.text, "forebay run --none");
    assert!(command.refusal().unwrap().contains("unexpected argument '--none'"));
    let table = "| message | `x` |\n|---|---|\n| `a … b` `c` | `d` |\n";
    assert_eq!(explained(table), ["a … b", "c"]);
    assert_eq!(one_line("\"one \\\n    line\""), "\"one line\"");
}

#[test]
fn commands_are_read_as_a_shell_reads_them() {
    let script = "$ forebay run -p 'a | b' \\\n  -n 4 < in > out # why\necho \"a # b\" | ./forebay run --json 2>&1 && ls\n\
                  cargo run --release -- plan x\ncargo test -p forebay\n";
    let found: Vec<_> = commands(script).collect();
    let expected = [&["run", "-p", "a | b", "-n", "4"][..], &["run", "--json"], &["plan", "x"]];
    assert_eq!(found, expected);
}

#[track_caller]
fn assert_none(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

/// What a page holds that can be wrong.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
    commands: Vec<Shown>,
    /// What is set as code within sentences.
    codes: Vec<String>,
}

/// A command that a page shows.
struct Shown {
    text: String,
    args: Vec<String>,
    /// In a block of code a command is whole. Within a sentence it may lack arguments, or be `help COMMAND`.
    whole: bool,
}

impl Shown {
    fn new(mut args: Vec<String>, whole: bool) -> Shown {
        args.retain(|arg| whole || arg != "COMMAND");
        Shown { text: format!("forebay {}", args.join(" ")), args, whole }
    }

    /// Why the program does not take the command, which it does not carry out.
    fn refusal(&self) -> Option<String> {
        let mut args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let only_says = ["help", "--help", "-h", "--version", "-V", "--print-config"];
        if !args.iter().any(|arg| only_says.contains(arg)) {
            args.push("--print-config");
        }
        let outcome = call(&args);
        let lacks = ["required arguments were not provided", "a value is required for"]
            .iter()
            .any(|words| outcome.stderr.contains(words));
        // `serve --plan` carries nothing out either, and does not go together with `--print-config`.
        let called_wrongly =
            outcome.code == Some(2) && !outcome.stderr.contains("cannot be used with '--print-config");
        (called_wrongly && (self.whole || !lacks)).then_some(outcome.stderr)
    }
}

/// All pages by their paths from the root.
fn pages(root: &Path) -> BTreeMap<String, Page> {
    let at_root = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(String::from);
    let names = at_root.into_iter().filter(|name| root.join(name).exists()).chain(files(root, "docs", ".md"));
    names.map(|name| (name.clone(), Page::of(&read(&root.join(name))))).collect()
}

/// The files with an ending in a folder and those below it, by their paths from the root.
fn files(root: &Path, folder: &str, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(root, &name, ending));
        } else if name.ends_with(ending) {
            found.push(name);
        }
    }
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// The messages in the first columns of a page's tables, with `…` for what varies.
fn explained(page: &str) -> Vec<&str> {
    let cells = page.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

/// Source text in which no literal is broken into lines or has quotes escaped.
fn one_line(source: &str) -> String {
    let mut pieces = source.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.trim_start()).replace("\\\"", "\"")
}

fn in_book(name: &str) -> bool {
    name.starts_with("docs/")
}

impl Page {
    fn of(text: &str) -> Page {
        let mut page = Page::default();
        let mut heading = None::<String>;
        let mut script = None::<String>;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => page.add_heading(&heading.take().unwrap()),
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language)))
                    if ["", "sh", "console"].contains(&&*language) =>
                {
                    script = Some(String::new());
                }
                Event::End(TagEnd::CodeBlock) => {
                    let script = script.take().unwrap_or_default();
                    page.commands.extend(commands(&script).map(|args| Shown::new(args, true)));
                }
                Event::Text(text) => {
                    if let Some(open) = script.as_mut().or(heading.as_mut()) {
                        open.push_str(&text);
                    }
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    page.commands.extend(commands(&code).map(|args| Shown::new(args, false)));
                    page.codes.push(code.into_string());
                }
                Event::Html(html) | Event::InlineHtml(html) => {
                    let values = |name| attributes(&html, name).map(String::from);
                    page.links.extend(["src", "srcset", "href"].into_iter().flat_map(values));
                    page.anchors.extend(["id", "name"].into_iter().flat_map(values));
                }
                _ => {}
            }
        }
        page
    }

    /// Gives a heading its anchor, as GitHub and mdBook make it.
    fn add_heading(&mut self, heading: &str) {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let numbered = (1..).map(|n| format!("{anchor}-{n}"));
        let free = std::iter::once(anchor.clone()).chain(numbered).find(|a| !self.anchors.contains(a));
        self.anchors.extend(free);
    }
}

/// The values of an attribute in HTML.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {name}=\"");
    let starts: Vec<usize> = html.match_indices(&start).map(|(at, _)| at + start.len()).collect();
    starts.into_iter().filter_map(|at| html[at..].split('"').next())
}

fn broken_links(root: &Path, pages: &BTreeMap<String, Page>) -> Vec<String> {
    let mut broken = Vec::new();
    for (name, page) in pages {
        for link in page.links.iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { name.clone() } else { resolve(name, path) };
            let wrong = if in_book(name) && !in_book(&target) {
                // On GitHub it would work; in the book that mdBook makes there is nothing.
                "this is outside of the book"
            } else if !root.join(&target).exists() {
                "there is no such file"
            } else if !anchor.is_empty() && !pages.get(&target).is_some_and(|p| p.anchors.contains(anchor)) {
                "there is no such heading"
            } else {
                continue;
            };
            broken.push(format!("{name}: {link}: {wrong}"));
        }
    }
    broken
}

/// The path from the root of what a page calls by a path from its own folder.
fn resolve(page: &str, path: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn unlisted(pages: &BTreeMap<String, Page>) -> Vec<String> {
    const CONTENTS: &str = "docs/SUMMARY.md";
    let listed: BTreeSet<String> = pages[CONTENTS].links.iter().map(|link| resolve(CONTENTS, link)).collect();
    let of_book = pages.keys().filter(|name| in_book(name) && *name != CONTENTS);
    of_book
        .filter(|name| !listed.contains(*name))
        .map(|name| format!("{name} is not in {CONTENTS}"))
        .collect()
}

/// The flags with long names in a text.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'));
    words.filter(|word| word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic)))
}

/// The arguments of each call of the program in a script.
fn commands(script: &str) -> impl Iterator<Item = Vec<String>> {
    simple_commands(script).into_iter().filter_map(|words| {
        let start = match &words[..] {
            [cargo, run, rest @ ..] if cargo == "cargo" => {
                let ours = run == "run" && !rest.iter().any(|word| word == "--example");
                2 + rest.iter().position(|word| word == "--").filter(|_| ours)?
            }
            _ => words.iter().position(|word| word == "forebay" || word.ends_with("/forebay"))?,
        };
        Some(words[start + 1..].to_vec())
    })
}

/// A script's commands in words, without redirections and comments.
fn simple_commands(script: &str) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let mut word = None::<String>;
    let mut redirected = false;
    let mut chars = script.chars().chain(['\n']).peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let next = chars.next().filter(|next| *next != '\n');
                word = word.or(next.map(|_| String::new()));
                word.iter_mut().for_each(|word| word.extend(next));
            }
            '\'' | '"' => {
                let quoted = chars.by_ref().take_while(|next| *next != c);
                word.get_or_insert_default().extend(quoted);
            }
            '#' if word.is_none() => while chars.next_if(|next| *next != '\n').is_some() {},
            c if c.is_whitespace() || "|&;()<>".contains(c) => {
                if let Some(word) = word.take()
                    && !std::mem::take(&mut redirected)
                    && !(c == '>' && word == "2")
                {
                    all.last_mut().expect("there is always one").push(word);
                }
                match c {
                    '<' | '>' => redirected = chars.next_if_eq(&'&').is_none_or(|_| chars.next().is_none()),
                    '\n' | '|' | '&' | ';' | '(' | ')' => all.push(Vec::new()),
                    _ => {}
                }
            }
            c => word.get_or_insert_default().push(c),
        }
    }
    all.retain(|words| !words.is_empty());
    all
}
