//! The alphabet of byte-level BPE: one printable character for each of the 256 bytes.

/// The alphabet in both directions.
#[derive(Debug)]
pub(super) struct ByteAlphabet {
    chars: [char; 256],
    /// The byte of each character. All characters are below U+0144, so a plain table suffices.
    bytes: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    /// Bytes that are visible Latin-1 characters represent themselves; the others get the characters from U+0100 on,
    /// in order. So a space is `Ġ` and a newline `Ċ`.
    pub(super) const fn new() -> ByteAlphabet {
        let mut alphabet = ByteAlphabet { chars: ['\0'; 256], bytes: [None; 0x144] };
        let mut next = 0x100;
        let mut byte = 0;
        while byte < 256 {
            let visible = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if visible { byte as u32 } else { next };
            if !visible {
                next += 1;
            }
            alphabet.chars[byte] = match char::from_u32(code) {
                Some(c) => c,
                None => unreachable!(),
            };
            alphabet.bytes[code as usize] = Some(byte as u8);
            byte += 1;
        }
        alphabet
    }

    /// The character of `byte`.
    pub(super) fn char(&self, byte: u8) -> char {
        self.chars[usize::from(byte)]
    }

    /// Replaces `out` by `text` spelled in the alphabet.
    pub(super) fn spell(&self, text: &str, out: &mut String) {
        out.clear();
        out.extend(text.bytes().map(|b| self.char(b)));
    }

    /// Appends the bytes that `word` spells. Returns `false` and appends nothing if a character is not in the
    /// alphabet.
    pub(super) fn read(&self, word: &str, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        for c in word.chars() {
            match self.bytes.get(c as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => {
                    out.truncate(start);
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_its_own_character() {
        let alphabet = ByteAlphabet::new();
        for byte in 0..=255 {
            let mut back = Vec::new();
            assert!(alphabet.read(&alphabet.char(byte).to_string(), &mut back));
            assert_eq!(back, [byte]);
        }
        assert_eq!(alphabet.char(b' '), 'Ġ');
        assert_eq!(alphabet.char(b'\n'), 'Ċ');
        assert_eq!(alphabet.char(0xad), 'Ń');
    }

    #[test]
    fn a_word_outside_the_alphabet_is_not_read() {
        let mut out = vec![7];
        assert!(!ByteAlphabet::new().read("ab▁", &mut out));
        assert_eq!(out, [7]);
    }
}
