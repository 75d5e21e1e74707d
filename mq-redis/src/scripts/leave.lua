-- Removes names of consumers that hold nothing. KEYS: stream, tries. ARGV: group, member ("" for none), idle time in ms from
-- which on other names are removed (0: none). Answer: names removed.
local stream, tries = KEYS[1], KEYS[2]
local group, me, old = ARGV[1], ARGV[2], tonumber(ARGV[3])
local removed = 0
local found = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if found.err then
  return 0
end
for _, info in ipairs(found) do
  local name, pending, idle = info[2], info[4], info[6]
  if pending == 0 and (name == me or (name ~= '~parked' and old > 0 and idle >= old)) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
    removed = removed + 1
  end
end
if old > 0 then
  -- Notes of entries that were settled by a plain acknowledgement. A group that was made again has some still to read.
  local here = group_of(stream, group)['last-delivered-id']
  local notes = redis.call('HSCAN', tries, '0', 'COUNT', 1000)[2]
  for i = 1, #notes, 2 do
    if not less(here, notes[i]) and not redis.call('XPENDING', stream, group, notes[i], notes[i], 1)[1] then
      redis.call('HDEL', tries, notes[i])
    end
  end
end
return removed
