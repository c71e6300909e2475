//! Text on a terminal, wrapped between words: an answer that comes in pieces, and the program's own messages.

use std::io::stderr;

use terminal_size::{Width, terminal_size_of};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Writes a message to standard error, wrapped if that is a terminal.
pub fn tell(message: &str) {
    match terminal_size_of(stderr()) {
        Some((Width(columns), _)) => eprintln!("{}", fold(message, columns.into())),
        None => eprintln!("{message}"),
    }
}

/// A text whose lines end between words, for a terminal with so many columns. A line of a list continues below the start of
/// its last column.
fn fold(text: &str, columns: usize) -> String {
    let width = columns.saturating_sub(1).max(1);
    text.split('\n').map(|line| fold_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn fold_line(line: &str, width: usize) -> String {
    if line.width() <= width {
        return line.to_owned();
    }
    // The last column follows two spaces; it is taken for one only where it leaves room for words.
    let start = line.rfind("  ").map_or(0, |at| at + 2);
    let indent = line[..start].width();
    let (start, indent) = if 2 * indent <= width { (start, indent) } else { (0, 0) };
    let mut folded = line[..start].to_owned();
    let mut column = indent;
    for (i, word) in line[start..].split(' ').enumerate() {
        if i > 0 && column + 1 + word.width() > width {
            folded.push('\n');
            folded.push_str(&" ".repeat(indent));
            column = indent;
        } else if i > 0 {
            folded.push(' ');
            column += 1;
        }
        folded.push_str(word);
        column += word.width();
    }
    folded
}

/// Wraps text as it comes. Each piece is written at once; a word that turns out too long for its line is erased there and
/// written again on the next one. Code between lines of three backticks is left as it is.
#[derive(Debug, Default)]
pub struct Wrap {
    /// Columns of the line at hand that are taken.
    column: usize,
    /// The word at the end of the line, and its columns.
    word: String,
    word_width: usize,
    /// What the line begins with, as far as it may be a fence.
    start: String,
    in_code: bool,
}

const FENCE: &str = "```";

impl Wrap {
    /// What is to be written for a piece of text, on a terminal with so many columns.
    pub fn push(&mut self, text: &str, columns: usize) -> String {
        // In the last column, terminals differ in where the cursor is.
        let width = columns.saturating_sub(1).max(1);
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '\n' => self.end_line(&mut out),
                _ if self.in_code => self.take(c, &mut out),
                _ if c.is_whitespace() => self.space(c, width, &mut out),
                _ => self.letter(c, width, &mut out),
            }
        }
        out
    }

    fn end_line(&mut self, out: &mut String) {
        out.push('\n');
        self.in_code ^= self.start == FENCE;
        self.start.clear();
        self.begin_line();
    }

    fn begin_line(&mut self) {
        self.column = 0;
        self.end_word();
    }

    fn end_word(&mut self) {
        self.word.clear();
        self.word_width = 0;
    }

    fn take(&mut self, c: char, out: &mut String) {
        if self.start.len() < FENCE.len() && (self.column > 0 || self.start.is_empty()) {
            self.start.push(c);
        }
        out.push(c);
        self.column += columns_of(c, self.column);
    }

    /// What does not fit at the end of a line is left out.
    fn space(&mut self, c: char, width: usize, out: &mut String) {
        self.end_word();
        if self.column + columns_of(c, self.column) <= width {
            self.take(c, out);
        }
    }

    fn letter(&mut self, c: char, width: usize, out: &mut String) {
        let columns = columns_of(c, self.column);
        // Between wide characters, as in Chinese and Japanese, a line may end anywhere.
        if columns > 1 {
            self.end_word();
        }
        if self.column + columns > width {
            if self.word_width + columns > width {
                // A word that fills a line is broken.
                self.end_word();
            }
            if self.word_width > 0 {
                // To the left, and erase from there.
                out.push_str(&format!("\x1b[{}D\x1b[K", self.word_width));
            }
            out.push('\n');
            out.push_str(&self.word);
            self.column = self.word_width;
        }
        self.word.push(c);
        self.word_width += columns;
        self.take(c, out);
    }
}

fn columns_of(c: char, column: usize) -> usize {
    if c == '\t' { 8 - column % 8 } else { c.width().unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a terminal of so many columns shows of a text that comes in pieces of so many characters.
    fn shown(text: &str, columns: usize, size: usize) -> Vec<String> {
        let mut wrap = Wrap::default();
        let letters: Vec<char> = text.chars().collect();
        let out: String =
            letters.chunks(size).map(|piece| wrap.push(&piece.iter().collect::<String>(), columns)).collect();
        let mut lines = vec![String::new()];
        let mut rest = out.chars();
        while let Some(c) = rest.next() {
            let line = lines.last_mut().unwrap();
            match c {
                '\n' => lines.push(String::new()),
                '\x1b' => {
                    let sequence: String = rest.by_ref().take_while(|c| *c != 'D').collect();
                    let mut erased: usize = sequence[1..].parse().unwrap();
                    while erased > 0 {
                        erased -= line.pop().unwrap().width().unwrap();
                    }
                    assert_eq!(rest.by_ref().take(3).collect::<String>(), "\x1b[K");
                }
                c => line.push(c),
            }
        }
        for line in &lines {
            let width: usize = line.chars().map(|c| c.width().unwrap_or(0)).sum();
            assert!(width < columns || line.starts_with("let "), "{line:?} has {width} columns");
        }
        lines
    }

    #[test]
    fn lines_end_between_words_however_the_text_is_cut() {
        let text = "The cat and the dog sailed away.\n\nThey were happy.";
        let expected = ["The cat ", "and the ", "dog ", "sailed ", "away.", "", "They ", "were ", "happy."];
        for size in [1, 2, 3, 7, 100] {
            assert_eq!(shown(text, 9, size), expected, "{size}");
            assert_eq!(shown(text, 80, size).join("\n"), text, "{size}");
        }
    }

    #[test]
    fn long_words_break_and_wide_characters_need_no_spaces() {
        for size in [1, 2, 100] {
            assert_eq!(shown("Donaudampfschiff ahoi", 9, size), ["Donaudam", "pfschiff", "ahoi"], "{size}");
            assert_eq!(shown("猫は船に乗って海へ", 9, size), ["猫は船に", "乗って海", "へ"], "{size}");
            assert_eq!(shown("a cafe\u{301} is open", 7, size), ["a cafe\u{301}", "is ", "open"], "{size}");
        }
    }

    #[test]
    fn messages_are_folded_between_words_and_lists_below_their_last_column() {
        assert_eq!(fold("A short line.\n\nAnother.", 20), "A short line.\n\nAnother.");
        assert_eq!(
            fold("The context is 84 % full: 153 are left.", 20),
            "The context is 84 %\nfull: 153 are left."
        );
        let list = "Keys:\n  Tab     complete a command, or a path\n";
        assert_eq!(fold(list, 30), "Keys:\n  Tab     complete a command,\n          or a path\n");
        assert_eq!(
            fold(list, 16),
            "Keys:\n  Tab    \ncomplete a\ncommand, or a\npath\n",
            "no room for a column"
        );
        assert_eq!(fold("Loaded /a/path/without/a/space.", 10), "Loaded\n/a/path/without/a/space.");
        for columns in 0..40 {
            assert_eq!(
                fold(list, columns).split_whitespace().collect::<Vec<_>>(),
                list.split_whitespace().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn code_is_left_as_it_is() {
        let text = "See:\n```rust\nlet long = \"a line of code\";\n```\nThat is all.";
        for size in [1, 4, 100] {
            let lines = shown(text, 10, size);
            assert_eq!(lines[2], "let long = \"a line of code\";", "{size}");
            assert_eq!(lines[4..], ["That is ", "all."], "{size}");
        }
    }
}
