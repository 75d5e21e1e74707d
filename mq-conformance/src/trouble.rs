//! What a test makes go wrong, each written into its timeline.

use crate::environment::Hook;
use crate::{Check, Connection, Test, TestFailure};

impl Test {
    /// Uses a hook of the environment.
    ///
    /// # Errors
    /// That the environment has no such hook.
    pub fn hook<T>(&self, answer: Hook<T>) -> Check<T> {
        answer.map_err(|e| TestFailure::new(format!("cannot be tested here: the environment lacks {}", e.0)))
    }

    /// Kills the program behind a connection.
    ///
    /// # Errors
    /// That the environment cannot.
    pub async fn crash(&self, connection: &Connection) -> Check {
        self.note(format_args!("{connection:?} crashes"));
        for (known, open) in self.shared().connections.lock().iter_mut() {
            if known.number == connection.number {
                *open = false;
            }
        }
        let answer = self.shared().environment.crash(connection).await;
        self.hook(answer)
    }

    /// Loses a connection.
    ///
    /// # Errors
    /// That the environment cannot.
    pub async fn cut(&self, connection: &Connection) -> Check {
        self.note(format_args!("{connection:?} is cut"));
        let answer = self.shared().environment.cut(connection).await;
        self.hook(answer)
    }

    /// Makes the broker unreachable from a connection, or reachable again.
    ///
    /// # Errors
    /// That the environment cannot.
    pub async fn reachable(&self, connection: &Connection, yes: bool) -> Check {
        self.note(format_args!("the broker is {} for {connection:?}", if yes { "back" } else { "away" }));
        let answer = self.shared().environment.reachable(connection, yes).await;
        self.hook(answer)
    }

    /// Holds back what the broker answers.
    ///
    /// # Errors
    /// That the environment cannot.
    pub async fn hold_answers(&self, connection: &Connection, hold: bool) -> Check {
        self.note(format_args!("answers to {connection:?} {}", if hold { "are held" } else { "flow" }));
        let answer = self.shared().environment.hold_answers(connection, hold).await;
        self.hook(answer)
    }

    /// Freezes a connection.
    ///
    /// # Errors
    /// That the environment cannot.
    pub async fn freeze(&self, connection: &Connection, frozen: bool) -> Check {
        self.note(format_args!("{connection:?} {}", if frozen { "freezes" } else { "thaws" }));
        let answer = self.shared().environment.freeze(connection, frozen).await;
        self.hook(answer)
    }
}
