//! Text that has come and has not been understood yet.

/// The longest stretch of white space that waits for what follows it. Of a longer one, the beginning is text.
pub(super) const MOST_SPACE: usize = 1024;

/// The longest name: of a function, of a parameter.
pub(super) const MOST_NAME: usize = 256;

/// Whether white space, as far as tags are concerned.
pub(super) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// A text without the white space at its start.
pub(super) fn trim_start(text: &str) -> &str {
    text.trim_start_matches([' ', '\n', '\r', '\t'])
}

/// A text without the white space at its ends.
pub(super) fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\n', '\r', '\t'])
}

/// What [`Input::find`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The tag of this number, and where it starts.
    Tag { at: usize, which: usize },
    /// No tag. None starts before this place.
    Nothing { sure: usize },
}

/// How a text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// With the tag of this number.
    With(usize),
    /// With what may become a tag.
    Maybe,
    /// With no tag.
    Without,
}

/// Text that has come and has not been understood yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Input {
    text: String,
    /// Where what is left starts.
    at: usize,
    /// Up to where it has been searched, from `at`.
    searched: usize,
    /// Whether no more will come.
    ended: bool,
}

impl Input {
    pub(super) fn push(&mut self, text: &str) {
        self.text.drain(..self.at);
        self.at = 0;
        self.text.push_str(text);
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// What is left.
    pub(super) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// Leaves `count` bytes behind. What follows is searched anew.
    pub(super) fn advance(&mut self, count: usize) {
        self.at += count;
        self.searched = 0;
    }

    /// Leaves white space behind.
    pub(super) fn skip_space(&mut self) {
        let rest = self.rest();
        let count = rest.len() - trim_start(rest).len();
        if count > 0 {
            self.advance(count);
        }
    }

    /// Finds the first of these tags. Until something is left behind, the tags must be the same ones, since no place is
    /// searched twice.
    pub(super) fn find(&mut self, tags: &[&str]) -> Found {
        self.find_near(tags, usize::MAX)
    }

    /// Finds the first of these tags if it starts at most `most` bytes from here.
    pub(super) fn find_near(&mut self, tags: &[&str], most: usize) -> Found {
        let mut firsts: Vec<char> = tags.iter().filter_map(|tag| tag.chars().next()).collect();
        firsts.dedup();
        let mut from = self.searched;
        while let Some(at) = self.rest()[from..].find(&firsts[..]) {
            let at = from + at;
            if at > most {
                self.searched = at;
                return Found::Nothing { sure: at };
            }
            let here = &self.rest()[at..];
            if let Some(which) = tags.iter().position(|tag| here.starts_with(tag)) {
                return Found::Tag { at, which };
            }
            if !self.ended && tags.iter().any(|tag| tag.starts_with(here)) {
                self.searched = at;
                return Found::Nothing { sure: at };
            }
            from = at + here.chars().next().map_or(1, char::len_utf8);
        }
        self.searched = self.rest().len();
        Found::Nothing { sure: self.searched }
    }

    /// Which of these tags the rest begins with.
    pub(super) fn begins(&self, tags: &[&str]) -> Begins {
        begins(self.rest(), tags, self.ended)
    }
}

/// Which of these tags a text begins with, of which more may come unless it has `ended`.
pub(super) fn begins(text: &str, tags: &[&str], ended: bool) -> Begins {
    if let Some(which) = tags.iter().position(|tag| text.starts_with(tag)) {
        Begins::With(which)
    } else if !ended && tags.iter().any(|tag| tag.starts_with(text)) {
        Begins::Maybe
    } else {
        Begins::Without
    }
}

/// Where text ends whose white space at the end may turn out to be none of it.
pub(super) fn without_space_at_end(text: &str) -> usize {
    let space = text.bytes().rev().take(MOST_SPACE).take_while(|&byte| is_space(byte)).count();
    text.len() - space
}
