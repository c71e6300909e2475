//! Normalisation of texts before they are cut.

use unicode_normalization_alignments::UnicodeNormalization as _;

use super::vocabulary::SPACE;

/// One step of a normaliser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Normalise {
    /// Converts to a Unicode normal form.
    Form(Form),
    /// Puts a prefix before a text, unless the text is empty.
    Prepend(String),
    /// Replaces every occurrence of a string.
    Replace { from: String, to: String },
}

/// The Unicode normal forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(super) enum Form {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
}

impl Normalise {
    /// The largest factor by which a text may become shorter.
    pub(super) fn shrinks_by(&self, text: &str) -> usize {
        match self {
            Normalise::Prepend(_) => 1,
            Normalise::Replace { from, to } => from.len().div_ceil(to.len().max(1)).max(1),
            Normalise::Form(_) if text.is_ascii() => 1,
            // The number of characters that one can be composed of, in the worst case.
            Normalise::Form(_) => 12,
        }
    }

    pub(super) fn apply(&self, text: String) -> String {
        match self {
            Normalise::Prepend(_) if text.is_empty() => text,
            Normalise::Prepend(prefix) => format!("{prefix}{text}"),
            Normalise::Replace { from, to } => text.replace(from, to),
            // ASCII is in every normal form.
            Normalise::Form(_) if text.is_ascii() => text,
            Normalise::Form(form) => form.of(&text),
        }
    }
}

impl Form {
    /// A text in this form. The tables are those of the library that most models were trained with.
    fn of(self, text: &str) -> String {
        match self {
            Form::Nfc => text.nfc().map(|(c, _)| c).collect(),
            Form::Nfd => text.nfd().map(|(c, _)| c).collect(),
            Form::Nfkc => text.nfkc().map(|(c, _)| c).collect(),
            Form::Nfkd => text.nfkd().map(|(c, _)| c).collect(),
        }
    }
}

/// Which parts of plain text get a `▁` in front, unless they have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepend {
    /// All: at the start of the text and after each literal token.
    Always,
    /// Only the one at the start of the text.
    First,
    /// None.
    Never,
}

/// Replaces each space by `▁` and prepends one as `prepend` says; `first` says whether the text is the start of the
/// whole text.
pub(super) fn metaspace(text: &str, prepend: Prepend, first: bool) -> String {
    let mut text = text.replace(' ', SPACE.encode_utf8(&mut [0; 4]));
    let wanted = match prepend {
        Prepend::Always => true,
        Prepend::First => first,
        Prepend::Never => false,
    };
    if wanted && !text.starts_with(SPACE) {
        text.insert(0, SPACE);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_forms_compose_and_decompose() {
        let forms = |text: &str| {
            [Form::Nfc, Form::Nfd, Form::Nfkc, Form::Nfkd].map(|f| Normalise::Form(f).apply(text.to_owned()))
        };
        assert_eq!(forms("e\u{301}"), ["é", "e\u{301}", "é", "e\u{301}"]);
        assert_eq!(forms("ﬁ"), ["ﬁ", "ﬁ", "fi", "fi"]);
        assert_eq!(forms("plain"), ["plain"; 4]);
    }

    #[test]
    fn an_empty_text_gets_no_prefix() {
        let prepend = Normalise::Prepend("▁".to_owned());
        assert_eq!(prepend.apply(String::new()), "");
        assert_eq!(prepend.apply("a".to_owned()), "▁a");
    }

    #[test]
    fn a_space_in_front_is_not_doubled() {
        assert_eq!(metaspace(" a b", Prepend::Always, false), "▁a▁b");
        assert_eq!(metaspace("a b", Prepend::Always, false), "▁a▁b");
        assert_eq!(metaspace("a b", Prepend::First, true), "▁a▁b");
        assert_eq!(metaspace("a b", Prepend::First, false), "a▁b");
        assert_eq!(metaspace("a b", Prepend::Never, true), "a▁b");
    }
}
