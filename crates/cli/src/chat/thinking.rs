//! Telling a model's reasoning from its answer, as both come in.

/// What a piece of text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What the model says to itself, between `<think>` and `</think>`.
    Reasoning,
    /// What it says to us.
    Answer,
}

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Takes text as it comes, however it is cut, and tells what it is.
pub struct Splitter {
    kind: Kind,
    /// Text that may be the beginning of a tag.
    held: String,
    /// Whether nothing but white space has come: a model reasons first or not at all.
    at_start: bool,
    /// White space that comes next is no part of what follows.
    trim: bool,
}

impl Splitter {
    /// A splitter for what follows a prompt. Some templates open the reasoning themselves.
    pub fn after(prompt: &str) -> Splitter {
        let reasoning = prompt.trim_end().ends_with(OPEN);
        let kind = if reasoning { Kind::Reasoning } else { Kind::Answer };
        Splitter { kind, held: String::new(), at_start: !reasoning, trim: true }
    }

    /// Takes text and passes on what is certain.
    pub fn push(&mut self, text: &str, emit: &mut impl FnMut(Kind, &str)) {
        self.held.push_str(text);
        loop {
            if self.at_start && !self.held.trim_start().is_empty() && !may_be(OPEN, self.held.trim_start()) {
                self.at_start = false;
            }
            let tag = match self.kind {
                Kind::Reasoning => CLOSE,
                Kind::Answer if self.at_start => OPEN,
                Kind::Answer => break,
            };
            let Some(at) = self.held.find(tag) else { break };
            let rest = self.held.split_off(at + tag.len());
            self.held.truncate(at);
            let before = std::mem::replace(&mut self.held, rest);
            if self.kind == Kind::Reasoning {
                self.pass_on(before.trim_end(), emit);
            }
            self.kind = if tag == OPEN { Kind::Reasoning } else { Kind::Answer };
            self.at_start = false;
            self.trim = true;
        }
        let keep = match self.kind {
            Kind::Reasoning => beginning_of(CLOSE, &self.held),
            Kind::Answer if self.at_start => self.held.len(),
            Kind::Answer => 0,
        };
        let held = self.held.split_off(self.held.len() - keep);
        let certain = std::mem::replace(&mut self.held, held);
        self.pass_on(&certain, emit);
    }

    /// Passes on what was held back.
    pub fn finish(mut self, emit: &mut impl FnMut(Kind, &str)) {
        let held = std::mem::take(&mut self.held);
        self.pass_on(&held, emit);
    }

    fn pass_on(&mut self, text: &str, emit: &mut impl FnMut(Kind, &str)) {
        let text = if self.trim { text.trim_start() } else { text };
        if !text.is_empty() {
            self.trim = false;
            emit(self.kind, text);
        }
    }
}

/// Whether a text begins with the tag, or the tag with the text.
fn may_be(tag: &str, text: &str) -> bool {
    tag.starts_with(text) || text.starts_with(tag)
}

/// How many bytes at the end of a text may be the beginning of a tag, white space before it included.
fn beginning_of(tag: &str, text: &str) -> usize {
    let partial = (1..tag.len()).rev().find(|&n| text.ends_with(&tag[..n])).unwrap_or(0);
    let before = &text[..text.len() - partial];
    text.len() - before.trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a text is, cut after every byte that ends a character, and whole.
    fn split(prompt: &str, text: &str) -> [String; 2] {
        let mut results = Vec::new();
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let halves = (0..text.len()).filter(|&at| text.is_char_boundary(at)).map(|at| {
            let (a, b) = text.split_at(at);
            vec![a.to_owned(), b.to_owned()]
        });
        for pieces in halves.chain([characters]) {
            let mut parts = [String::new(), String::new()];
            let mut emit = |kind: Kind, text: &str| parts[kind as usize].push_str(text);
            let mut splitter = Splitter::after(prompt);
            pieces.iter().for_each(|piece| splitter.push(piece, &mut emit));
            splitter.finish(&mut emit);
            results.push(parts);
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{results:?}");
        results.pop().unwrap()
    }

    #[test]
    fn reasoning_and_answer_are_told_apart_however_the_text_is_cut() {
        assert_eq!(split("", "Hello, <b>you</b>."), ["", "Hello, <b>you</b>."]);
        assert_eq!(split("", "<think>\nOne, two.\n</think>\n\nThree."), ["One, two.", "Three."]);
        assert_eq!(split("…<think>\n", "One </thin\n</think>Two\n"), ["One </thin", "Two\n"]);
        assert_eq!(
            split("", "\n\nA < b, and <think> is a tag.</think>"),
            ["", "A < b, and <think> is a tag.</think>"]
        );
        assert_eq!(split("", "<think>It never ends <"), ["It never ends <", ""]);
        assert_eq!(split("", "<thi"), ["", "<thi"]);
        assert_eq!(split("", "<think></think>Ähm."), ["", "Ähm."]);
    }
}
