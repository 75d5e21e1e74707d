//! Scripts: each uses the keys of one topic only, so that all of them run on a Cluster too. Sent by their hash; a server that
//! does not have one yet (restart, failover) gets the text with the next call.

use crate::answer::checked;
use crate::conn::Conn;
use crate::connect::Link;
use redis::{Cmd, RedisError, Value};
use std::sync::OnceLock;

/// A script and its hash.
pub(crate) struct Script {
    text: &'static str,
    hash: OnceLock<String>,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $file:literal;)*) => {
        $( $(#[$doc])* pub(crate) static $name: Script = Script::new(concat!("#!lua flags=allow-oom\n", include_str!("ids.lua"), include_str!($file))); )*
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, &Script)] = &[$(($file, &$name)),*];
    };
}
scripts! {
    /// Settlements.
    SETTLE = "settle.lua";
    /// What is due, and what dead members held.
    TAKE = "take.lua";
    /// What this member held before.
    ADOPT = "adopt.lua";
    /// Leases.
    RENEW = "renew.lua";
    /// What is new, where others may remove what was not read.
    READ = "read.lua";
    /// What is new for a broadcast subscription.
    LOOK = "look.lua";
    /// Retention.
    TRIM = "trim.lua";
    /// What is ahead of a group.
    PLACE = "place.lua";
    /// Retention of a full topic.
    SWEEP = "sweep.lua";
    /// Making groups.
    REVIVE = "revive.lua";
    /// Consumer names.
    LEAVE = "leave.lua";
    /// Moving a group.
    RESET = "reset.lua";
}

impl Script {
    const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    fn hash(&self) -> &str {
        self.hash.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }

    /// A call with these keys; arguments follow by `arg`.
    pub(crate) fn on(&'static self, keys: &[&str]) -> Call {
        Call { script: self, keys: keys.iter().map(|k| (*k).to_owned()).collect(), args: Vec::new() }
    }
}

/// A call of a script.
pub(crate) struct Call {
    script: &'static Script,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
}

impl Call {
    pub(crate) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.args.push(arg.as_ref().to_vec());
        self
    }

    pub(crate) fn push(&mut self, arg: impl Into<Vec<u8>>) {
        self.args.push(arg.into());
    }

    fn cmd(&self, name: &str, script: &str) -> Cmd {
        let size = self.args.iter().map(Vec::len).sum::<usize>() + 256;
        let mut cmd = Cmd::with_capacity(self.args.len() + self.keys.len() + 3, size);
        cmd.arg(name).arg(script).arg(self.keys.len());
        self.keys.iter().for_each(|k| {
            cmd.arg(k);
        });
        self.args.iter().for_each(|a| {
            cmd.arg(a.as_slice());
        });
        cmd
    }

    /// The call as a command that needs no answer before it: for a transaction.
    pub(crate) fn with_text(&self) -> Cmd {
        self.cmd("EVAL", self.script.text)
    }

    /// Calls it by its hash, or by its text if the server does not know it.
    pub(crate) async fn run(&self, link: &Link) -> Result<Value, RedisError> {
        self.run_on(&link.conn).await
    }

    /// As [`run`](Self::run), on this connection.
    pub(crate) async fn run_on(&self, conn: &Conn) -> Result<Value, RedisError> {
        let answer = conn.send_packed_command(&self.cmd("EVALSHA", self.script.hash())).await.and_then(checked);
        match answer {
            Err(error) if error.code() == Some("NOSCRIPT") => {
                conn.send_packed_command(&self.cmd("EVAL", self.script.text)).await.and_then(checked)
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ALL;

    #[test]
    fn no_entry_is_claimed_by_force() {
        // An entry past the last delivered one would be acknowledged and delivered again.
        assert!(ALL.iter().all(|(_, script)| !script.text.contains("FORCE")));
    }

    #[test]
    fn scripts_may_run_when_memory_is_short() {
        // Settling frees memory: a script that refuses to run would make it worse.
        for (file, script) in ALL {
            assert!(script.text.starts_with("#!lua flags="), "{file}");
            assert_eq!(script.hash().len(), 40, "{file}");
        }
    }
}
