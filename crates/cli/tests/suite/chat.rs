//! The chat on a real terminal, which tmux provides.

#![cfg(unix)]

use std::process::Command;
use std::time::{Duration, Instant};

use forebay_testing::{Need, skipped};

use crate::common::demo_model;

/// A terminal with a program in it.
struct Terminal {
    socket: String,
}

impl Terminal {
    /// Starts `forebay` with these arguments; `None` where there is no tmux.
    fn start(name: &str, home: &std::path::Path, args: &[&str]) -> Option<Terminal> {
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
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "50", &command]);
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
    terminal.wait_for("tok/s · first token", 1);

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
    terminal.wait_for("This is the beginning", 1);
    terminal.line("/undo");
    terminal.wait_for("there is nothing to take back", 1);

    terminal.line(&format!("/load {}", file.display()));
    let screen =
        terminal.wait_for("Loaded 2 messages. The last question is now: Tell me a story about a cat.", 1);
    assert!(!screen.contains("read again"), "{screen}");
    terminal.line("/set max-tokens 5");
    terminal.line("/stats");
    terminal.wait_for("expert slots", 1);

    terminal.line("\"\"\"");
    terminal.keys("And then?");
    terminal.keys("And then?\"\"\"");
    terminal.wait_for("tok/s · first token", 3);
    terminal.line("/nonsense");
    terminal.wait_for("there is no /nonsense; there is /help", 1);
    terminal.line("/quit");
    terminal.wait_for("ended with 0", 1);
    let history = std::fs::read_to_string(folder.path().join("forebay/history")).unwrap();
    assert!(history.contains("/undo") && history.contains("And then?"), "{history}");
}

#[test]
fn leaving_has_its_exit_codes() {
    let folder = tempfile::tempdir().unwrap();
    for (key, code) in [("C-d", 0), ("C-c", 130)] {
        let Some(terminal) = Terminal::start(key, folder.path(), &["run", &demo_model()]) else { return };
        terminal.wait_for("> ", 1);
        terminal.key(key);
        terminal.wait_for(&format!("ended with {code}"), 1);
    }
}
