-- Reads without blocking, and tells what left the stream unread. Both are one step: between two more could go unnoticed, and the
-- server's own counter of a group does not skip what is gone, or skips it silently, depending on its version.
-- KEYS: stream. ARGV: group, member, most entries.
-- Answer: entries that are lost (-1: some, but how many is not known), id up to which the group has everything, entries.
local stream, group, me, most = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local info, own = redis.pcall('XINFO', 'STREAM', stream), nil
if info.err then
  return redis.error_reply('NOGROUP no such stream')
end
info = named(info)
for _, found in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  found = named(found)
  if found['name'] == group then
    own = found
  end
end
if not own then
  return redis.error_reply('NOGROUP no such group')
end
local added, generated, deleted = info['entries-added'], info['last-generated-id'], info['max-deleted-entry-id']
local first = info['first-entry'] and info['first-entry'][1]
local before, read = own['last-delivered-id'], own['entries-read']
-- Entries that are gone from the front.
local removed = added - info['length']

local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', most, 'STREAMS', stream, '>')
local entries = reply and reply[1] and reply[1][2] or {}
local at = before
if #entries < most then
  at = generated
elseif #entries > 0 then
  at = entries[#entries][1]
end

local lost, known = 0, -1
if less(before, generated) and (not first or less(before, first)) and (not first or less(deleted, first)) then
  known = removed + #entries
  if read then
    lost = removed - read
  elseif before ~= '0-0' then
    lost = -1
  end
  -- A group that others made, and that has not read yet, may have been made after what is gone.
elseif less(before, deleted) and not less(at, deleted) then
  lost = -1
  if at == generated then
    known = added
  end
end
if lost ~= 0 or known ~= -1 then
  redis.call('XGROUP', 'SETID', stream, group, at, 'ENTRIESREAD', known)
end
return {lost, at, entries}
