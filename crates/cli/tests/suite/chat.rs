//! The chat on a real terminal, which tmux provides.

#![cfg(unix)]

use std::process::Command;
use std::time::{Duration, Instant};

use forebay_testing::{Need, skipped};

use crate::common::{demo_model, forebay};

/// A terminal with a program in it.
struct Terminal {
    socket: String,
}

impl Terminal {
    /// Starts `forebay` with these arguments; `None` where there is no tmux.
    fn start(name: &str, home: &std::path::Path, args: &[&str]) -> Option<Terminal> {
        Terminal::start_wide(name, home, args, 120)
    }

    /// The same, with so many columns.
    fn start_wide(name: &str, home: &std::path::Path, args: &[&str], columns: usize) -> Option<Terminal> {
        if Command::new("tmux").arg("-V").output().is_err() {
            skipped(Need::Tmux, "there is no tmux here");
            return None;
        }
        let terminal = Terminal { socket: format!("forebay-{name}-{}", std::process::id()) };
        let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
        let program = env!("CARGO_BIN_EXE_forebay");
        let command =
            format!("HOME='{0}' XDG_STATE_HOME='{0}' {program} {1}", home.display(), quoted.join(" "));
        // What it leaves on the screen is still there when it has ended.
        let command = format!("{command}; echo \"ended with $?\"; sleep 60");
        terminal.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            &columns.to_string(),
            "-y",
            "50",
            &command,
        ]);
        Some(terminal)
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux").args(["-L", &self.socket]).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Types a line where one is asked for. What is typed before that is lost, and the prompt of the line before looks the same:
    /// so a line is seen on the screen before it is ended.
    #[track_caller]
    fn line(&self, text: &str) {
        self.wait_for_last_line(">");
        self.tmux(&["send-keys", "-l", text]);
        self.wait_for_last_line(&format!("> {text}"));
        self.key("Enter");
    }

    #[track_caller]
    fn wait_for_last_line(&self, line: &str) {
        let start = Instant::now();
        while self.screen().trim_end().lines().last().map(str::trim_end) != Some(line) {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "no {line:?} at the end of:\n{}",
                self.screen()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Types a line, whatever is on the screen.
    fn keys(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]);
        self.key("Enter");
    }

    fn key(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// Everything that was on the screen.
    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-J", "-S", "-"])
    }

    /// Waits until a text has come up so many times.
    #[track_caller]
    fn wait_for(&self, text: &str, times: usize) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if screen.matches(text).count() >= times {
                return screen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no {times} × {text:?} in:\n{screen}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.socket, "kill-server"]).output();
    }
}

#[test]
fn an_answer_is_stopped_undone_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_model();
    // Slow enough to be stopped.
    let args = ["run", &model, "--exact", "--threads", "1", "--ignore-eos", "--temp", "0"];
    let Some(terminal) = Terminal::start("turns", folder.path(), &args) else { return };
    terminal.wait_for("Ctrl-D leaves", 1);
    terminal.wait_for("> ", 1);

    terminal.line("Tell me a story about a cat.");
    terminal.wait_for("One day", 1);
    terminal.key("C-c");
    terminal.wait_for("[stopped]", 1);
    terminal.wait_for(" tok/s", 1);

    let nowhere = folder.path().join("nowhere/chat.json");
    terminal.line(&format!("/save {}", nowhere.display()));
    let refused = format!("error: cannot write {}: No such file or directory", nowhere.display());
    let screen = terminal.wait_for(&refused, 1);
    assert_eq!(screen.matches("No such file").count(), 1, "{screen}");
    let file = folder.path().join("chat.json");
    terminal.line(&format!("/save {}", file.display()));
    terminal.wait_for("Saved 2 messages", 1);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "Tell me a story about a cat.");
    let answer = saved["messages"][1]["content"].as_str().unwrap();
    assert!(answer.starts_with("One day") && !answer.contains("stopped"), "{answer}");

    terminal.line("/undo");
    terminal.wait_for("The conversation is empty.", 1);
    terminal.line("/undo");
    terminal.wait_for("there is no message to remove", 1);

    terminal.line(&format!("/load {}", file.display()));
    let screen =
        terminal.wait_for("Loaded 2 messages. The last message is now: Tell me a story about a cat.", 1);
    assert!(!screen.contains("processed again"), "{screen}");
    terminal.line("/set max-tokens 5");
    terminal.wait_for("max-tokens is now 5.", 1);
    terminal.line("/system Be brief.");
    terminal.wait_for("The system prompt is set.", 1);
    terminal.line("/think off");
    terminal.wait_for("The chat template of this model has no switch for reasoning", 1);
    terminal.line("/stats");
    terminal.wait_for("expert slots", 1);

    terminal.line("\"\"\"");
    terminal.keys("And then?");
    terminal.keys("And then?\"\"\"");
    terminal.wait_for(" tok/s", 3);
    terminal.line("/nonsense");
    terminal.wait_for("there is no command /nonsense; the commands are /help", 1);
    terminal.line("/bye");
    terminal.wait_for("ended with 0", 1);
    let history = std::fs::read_to_string(folder.path().join("forebay/history")).unwrap();
    assert!(history.contains("/undo") && history.contains("And then?"), "{history}");
}

#[test]
fn leaving_has_its_exit_codes() {
    let folder = tempfile::tempdir().unwrap();
    for (key, code) in [("C-d", 0), ("C-c", 130)] {
        let Some(terminal) = Terminal::start(key, folder.path(), &["run", &demo_model()]) else { return };
        terminal.wait_for_last_line(">");
        terminal.key(key);
        if key == "C-c" {
            terminal.wait_for("To leave, press Ctrl-C again, press Ctrl-D or type /quit.", 1);
            terminal.wait_for_last_line(">");
            terminal.key(key);
        }
        terminal.wait_for(&format!("ended with {code}"), 1);
    }
}

#[test]
fn lines_are_cleared_continued_and_completed() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_model();
    let args = ["run", &model, "-n", "3", "--temp", "0"];
    let Some(terminal) = Terminal::start("keys", folder.path(), &args) else { return };
    terminal.wait_for_last_line(">");
    terminal.tmux(&["send-keys", "-l", "half a line"]);
    terminal.wait_for_last_line("> half a line");
    terminal.key("C-c");
    terminal.wait_for_last_line(">");

    terminal.tmux(&["send-keys", "-l", "one"]);
    terminal.key("M-Enter");
    terminal.keys("two\\");
    terminal.tmux(&["send-keys", "-l", "three"]);
    terminal.wait_for_last_line("three");
    terminal.key("Enter");
    terminal.wait_for(" tok/s", 1);
    let file = folder.path().join("chat.json");
    terminal.line(&format!("/save {}", file.display()));
    terminal.wait_for("Saved 2 messages", 1);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "one\ntwo\nthree");

    terminal.wait_for_last_line(">");
    terminal.tmux(&["send-keys", "-l", &format!("/load {}/ch", folder.path().display())]);
    terminal.key("Tab");
    terminal.wait_for_last_line(&format!("> /load {}", file.display()));
    terminal.key("Enter");
    terminal.wait_for("Loaded 2 messages.", 1);
    terminal.line("/exit");
    terminal.wait_for("ended with 0", 1);
}

#[test]
fn a_conversation_goes_on_when_the_context_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_model();
    let args = ["run", &model, "--ctx", "140", "-n", "40", "--ignore-eos", "--temp", "0"];
    let Some(terminal) = Terminal::start("full", folder.path(), &args) else { return };
    terminal.line("Tell me a story about a cat.");
    terminal.line("And then?");
    let screen = terminal.wait_for(" of 140 tokens are left. /drop drops the oldest turns.", 1);
    assert!(screen.contains("The context is 8"), "{screen}");
    terminal.line("And then?");
    terminal.wait_for("[the context is full]", 1);
    terminal.wait_for("The context of 140 tokens is full, so the answer ends early.", 1);
    terminal.wait_for("[Y/n]", 1);
    // Neither yes nor no: perhaps it was meant as a message.
    terminal.keys("and then?");
    terminal.wait_for("Please answer y or n.", 1);
    terminal.wait_for("[Y/n]", 2);
    terminal.keys("n");
    terminal.wait_for("Nothing was dropped.", 1);

    // The next message does not fit: the oldest turns make room for it.
    terminal.line("And then?");
    terminal.wait_for("do not fit the context of 140", 1);
    terminal.wait_for("[Y/n]", 3);
    terminal.key("Enter");
    terminal.wait_for("Dropped the 2 oldest turns. The remaining turns take ", 1);
    terminal.wait_for(" tok/s", 4);
    terminal.line("/drop");
    terminal.wait_for("Dropped the oldest turn.", 1);
    terminal.line("/drop");
    terminal.wait_for("there are no older turns to drop", 1);
}

#[test]
fn the_chats_own_lines_end_between_words() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_model();
    let Some(terminal) = Terminal::start_wide("folded", folder.path(), &["run", &model], 40) else { return };
    terminal.line("/help");
    let screen = terminal.wait_for("The line after an answer:", 1);
    let lines: Vec<&str> = screen.lines().map(str::trim_end).collect();
    assert!(lines.iter().all(|line| line.len() < 40), "{screen}");
    assert!(lines.contains(&"and keys. Ctrl-C stops an answer,"), "{screen}");
    terminal.line("/nonsense");
    let screen = terminal.wait_for("/quit", 2);
    assert!(screen.lines().any(|line| line.trim_end().ends_with("the")), "{screen}");
}

#[test]
fn an_answer_is_wrapped_between_words_on_a_terminal_and_not_in_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_model();
    let args = ["run", &model, "-p", "Tell me a story about a dragon.", "--seed", "20"];
    let Some(terminal) = Terminal::start_wide("wrap", folder.path(), &args, 40) else { return };
    let screen = terminal.wait_for("ended with 0", 1);
    let lines: Vec<&str> = screen.lines().take_while(|line| !line.is_empty()).map(str::trim_end).collect();
    assert!(lines.len() > 5 && lines.iter().all(|line| line.len() < 40), "{screen}");
    let piped = forebay(args).output().unwrap();
    assert_eq!(String::from_utf8(piped.stdout).unwrap().trim_end(), lines.join(" "));
}
