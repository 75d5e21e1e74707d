-- Reads without blocking for a broadcast subscription, and tells where the stream stands, in one step.
-- KEYS: stream. ARGV: id read so far, most entries.
-- Answer: entries ever added, entries gone from the front where that is beyond what was read (else -1), whether nothing is left to
-- read (1), entries, last id ever given.
local stream, from, most = KEYS[1], ARGV[1], tonumber(ARGV[2])
if redis.call('EXISTS', stream) == 0 then
  return {0, -1, 1, {}, '0-0'}
end
local info = named(redis.call('XINFO', 'STREAM', stream))
local first = info['first-entry'] and info['first-entry'][1]
local gone = -1
if not first or (less(from, first) and less(info['max-deleted-entry-id'], first)) then
  gone = info['entries-added'] - info['length']
end
local reply = redis.call('XREAD', 'COUNT', most, 'STREAMS', stream, from)
local entries = reply and reply[1] and reply[1][2] or {}
local ended = #entries < most
return {info['entries-added'], gone, ended and 1 or 0, entries, info['last-generated-id']}
