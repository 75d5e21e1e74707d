-- Removes entries that all groups handled behind one that some group has not: a delayed entry at the front would else keep
-- everything after it. One by one, which costs more than trimming, so only a topic that is full is swept.
-- KEYS: stream, notes of the topic. ARGV: id to go on from, most entries to look at.
-- Answer: entries removed, id to go on from ("": the end was reached).
local stream, from, most = KEYS[1], ARGV[1], tonumber(ARGV[2])
if redis.call('EXISTS', stream) == 0 then
  return {0, ''}
end
local groups = redis.call('XINFO', 'GROUPS', stream)
local upto
for at, info in ipairs(groups) do
  groups[at] = named(info)
  local delivered = groups[at]['last-delivered-id']
  if not upto or less(delivered, upto) then
    upto = delivered
  end
end
if not upto then
  return {0, ''}
end
local found = redis.call('XRANGE', stream, from, upto, 'COUNT', most)
if #found == 0 then
  return {0, ''}
end
local first, last = found[1][1], found[#found][1]
local held = {}
for _, group in ipairs(groups) do
  -- More than there are entries, where others removed some that were pending.
  local begin = first
  repeat
    local pending = redis.call('XPENDING', stream, group['name'], begin, last, most)
    for _, entry in ipairs(pending) do
      held[entry[1]] = true
      begin = '(' .. entry[1]
    end
  until #pending < most
end
local handled = {'XDEL', stream}
for _, entry in ipairs(found) do
  if not held[entry[1]] then
    handled[#handled + 1] = entry[1]
  end
end
local removed = #handled > 2 and redis.call(unpack(handled)) or 0
ours(KEYS[2], removed)
return {removed, #found == most and '(' .. last or ''}
